import torch
from logitship import CustomLogitProcessor


class SecondChoice(CustomLogitProcessor):
    """Forbids the most likely token at each step."""

    def __call__(self, logits, custom_param_list=None):
        return logits.scatter(1, logits.argmax(dim=-1, keepdim=True), -torch.inf)
