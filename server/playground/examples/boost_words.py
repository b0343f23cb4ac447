from logitship import CustomLogitProcessor


class BoostWords(CustomLogitProcessor):
    """Makes some words more likely: adds a bias to their first tokens."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            encode = params["__req__"].tokenizer.encode
            words = [encode(" " + word, add_special_tokens=False) for word in params["words"]]
            logits[row, list({word[0] for word in words})] += params["bias"]
        return logits
