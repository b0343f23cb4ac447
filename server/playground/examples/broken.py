from logitship import CustomLogitProcessor


class Broken(CustomLogitProcessor):
    """Fails at its fourth token, which ends its request."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            if len(params["__req__"].output_ids) == 3:
                # The parameter's name is token_ids.
                logits[row, params["token_id"]] += 1.0
        return logits
