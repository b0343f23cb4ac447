import torch
from logitship import CustomLogitProcessor


class SecondChoice(CustomLogitProcessor):
    """Contrary: forbids the most likely token, each time."""

    def __call__(self, logits, custom_param_list=None):
        return logits.scatter(1, logits.argmax(dim=-1, keepdim=True), -torch.inf)
