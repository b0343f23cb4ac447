import torch
from logitship import CustomLogitProcessor


class Uppercase(CustomLogitProcessor):
    """Forbids tokens with a lower-case letter."""

    def __init__(self):
        self.banned = None

    def __call__(self, logits, custom_param_list=None):
        if self.banned is None:
            request = custom_param_list[0]["__req__"]  # all rows have the same vocabulary
            tokens = request.tokenizer.convert_ids_to_tokens(range(request.vocab_size))
            lower = [any(letter.islower() for letter in token or "") for token in tokens]
            self.banned = torch.tensor(lower)
            self.banned[list(request.eos_token_ids)] = False
        return logits.masked_fill(self.banned, -torch.inf)
