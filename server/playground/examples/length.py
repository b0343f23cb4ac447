import torch
from logitship import CustomLogitProcessor


class Length(CustomLogitProcessor):
    """Generates at least `least` tokens, then ends after a full sentence."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            request = params["__req__"]
            written, ends = request.output_ids, list(request.eos_token_ids)
            last = request.tokenizer.decode(written[-1:]).rstrip()
            if len(written) < params["least"]:
                logits[row, ends] = -torch.inf
            elif last.endswith((".", "!", "?")):
                logits[row] = -torch.inf
                logits[row, ends] = 0.0
        return logits
