import torch
from logitship import CustomLogitProcessor


class Lipogram(CustomLogitProcessor):
    """Forbids tokens with a letter."""

    def __init__(self):
        self.banned = {}

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            request, letter = params["__req__"], params["letter"]
            banned = self.tokens_with(letter, request)
            logits[row, banned] = -torch.inf
        return logits

    def tokens_with(self, letter, request):
        """Return bool [vocab]. Made once per letter."""
        if letter not in self.banned:
            ids = range(request.vocab_size)
            tokens = request.tokenizer.convert_ids_to_tokens(ids)
            banned = torch.tensor([letter in (t or "").lower() for t in tokens])
            banned[list(request.eos_token_ids)] = False  # the answer must be able to end
            self.banned[letter] = banned
        return self.banned[letter]
