import torch
from logitship import CustomLogitProcessor


class Alliteration(CustomLogitProcessor):
    """Prefers words that begin with a letter."""

    def __init__(self):
        self.liked = {}

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            liked = self.words_with(params["letter"], params["__req__"])
            logits[row] += params["bias"] * liked
        return logits

    def words_with(self, letter, request):
        """float32 [vocab]: 1 for the tokens that begin a word with the letter."""
        if letter not in self.liked:
            # Ġ is how the vocabulary writes a space.
            starts = ("Ġ" + letter.lower(), "Ġ" + letter.upper())
            tokens = request.tokenizer.convert_ids_to_tokens(range(request.vocab_size))
            liked = [float((token or "").startswith(starts)) for token in tokens]
            self.liked[letter] = torch.tensor(liked)
        return self.liked[letter]
