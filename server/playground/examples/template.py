import torch
from logitship import CustomLogitProcessor

DIGITS = "0123456789"


class Template(CustomLogitProcessor):
    """Fills in a template, in which `#` matches a digit."""

    def __init__(self):
        self.by_start = {}  # first character → tokens

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            request = params["__req__"]
            written = request.tokenizer.decode(request.output_ids)
            rest = params["template"][len(written) :]
            allowed = self.fitting(rest, request) if rest else request.eos_token_ids
            forbidden = torch.ones_like(logits[row], dtype=torch.bool)
            forbidden[list(allowed)] = False
            logits[row, forbidden] = -torch.inf
        return logits

    def fitting(self, rest, request):
        """Return the tokens that match the start of `rest`, the rest of the template."""
        if not self.by_start:
            ids = range(request.vocab_size)
            for i, token in zip(ids, request.tokenizer.convert_ids_to_tokens(ids)):
                text = (token or "").replace("Ġ", " ")  # Ġ is a space in the vocabulary
                self.by_start.setdefault(text[:1], []).append((i, text))
        starts = DIGITS if rest[0] == "#" else rest[0]
        candidates = [each for start in starts for each in self.by_start.get(start, ())]
        return [i for i, text in candidates if fits(text, rest)]


def fits(text, rest):
    if len(text) > len(rest):
        return False
    return all(c in DIGITS if expected == "#" else c == expected for c, expected in zip(text, rest))
