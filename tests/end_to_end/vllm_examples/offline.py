"""A vLLM script on a machine without vLLM: only the first lines mention logitship."""

import logitship

logitship.enable_vllm_names()

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor  # noqa: E402
from vllm.v1.sample.logits_processor.builtin import process_dict_updates  # noqa: E402


class TargetToken(LogitsProcessor):
    """Forces token 42 for a prompt with `extra_args={"target_token": 42}`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets,
            batch_update,
            lambda params, _prompt_token_ids, _output_token_ids: (params.extra_args or {}).get("target_token"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token_id in self.targets.items():
            kept = logits[row, token_id].item()
            logits[row] = -torch.inf
            logits[row, token_id] = kept
        return logits


def main() -> None:
    llm = LLM(model="SmolLM2-135M-Instruct", logits_processors=[TargetToken])
    prompts = ["Hello, my name is", "The capital of France is", "The moon is"]
    params = [
        SamplingParams(temperature=0.0, extra_args={"target_token": 67}),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, extra_args={"target_token": 128}),
    ]
    for output in llm.generate(prompts, params):
        print(repr(output.prompt), output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
