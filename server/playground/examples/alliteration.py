import torch
from logitship import CustomLogitProcessor


class Alliteration(CustomLogitProcessor):
    """Prefers words that start with a letter."""

    def __init__(self):
        self.masks = {}

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            mask = self.mask_of(params["letter"], params["__req__"])
            logits[row] += params["bias"] * mask
        return logits

    def mask_of(self, letter, request):
        """Return float32 [vocab]: 1 for tokens that start a word with the letter."""
        if letter not in self.masks:
            # Ġ is a space in the vocabulary.
            starts = ("Ġ" + letter.lower(), "Ġ" + letter.upper())
            tokens = request.tokenizer.convert_ids_to_tokens(range(request.vocab_size))
            mask = [float((token or "").startswith(starts)) for token in tokens]
            self.masks[letter] = torch.tensor(mask)
        return self.masks[letter]
