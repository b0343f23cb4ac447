import torch
from logitship import CustomLogitProcessor


class OneOf(CustomLogitProcessor):
    """Restricts the answer to one of the choices."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            written, tokenizer = params["__req__"].output_ids, params["__req__"].tokenizer
            forbidden = torch.ones_like(logits[row], dtype=torch.bool)
            for choice in params["choices"]:
                answer = tokenizer.encode(choice, add_special_tokens=False)
                answer.append(tokenizer.eos_token_id)
                if answer[: len(written)] == written:
                    forbidden[answer[len(written)]] = False
            logits[row, forbidden] = -torch.inf
        return logits
