from logitship import CustomLogitProcessor


class Cooling(CustomLogitProcessor):
    """Lowers the temperature from `start` to `end` over `steps` tokens."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            start, end = params["start"], params["end"]
            done = min(1.0, len(params["__req__"].output_ids) / params["steps"])
            logits[row] /= start + done * (end - start)
        return logits
