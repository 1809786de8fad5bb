"""The engines' programming model in one file: roll out, train with your own methods, sync, roll out again.

The algorithm is methods on a `torch.nn.Module`; an engine runs them on its workers. Here on the tiny model, with two
training ranks and one vLLM replica; with a hub id and GPUs nothing else changes.

    python examples/quick_start.py [MODEL]
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from transformers import Qwen2ForCausalLM

import rlbench as rb
from rlbench import NeedParallel

PROMPTS = ["sort 52143", "sort 9071"] * 8


class MyQwenModel(rb.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_step(self, input_ids: list[list[int]], grad_acc_steps: int = 1):
        """Language loss on these rows; accumulates gradients."""
        input_ids = torch.tensor(input_ids, dtype=torch.long, device=self.device)
        logits = self(input_ids).logits[:, :-1].contiguous()
        labels = input_ids[:, 1:].contiguous()
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)).mean()
        loss = loss / grad_acc_steps
        loss.backward()
        return loss.item()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def log_probs(self, input_ids: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it."""
        input_ids = torch.tensor(input_ids, dtype=torch.long, device=self.device)
        logits = self(input_ids).logits[:, :-1].float()
        return torch.gather(logits.log_softmax(-1), -1, input_ids[:, 1:, None])[..., 0].tolist()


def log_prob_gap(train_engine, rollouts) -> float:
    """Largest difference between the trainer's log-probs of sampled tokens and the sampler's own."""
    gaps = []
    for group in rollouts:
        answer = group.outputs[0]
        trainer = train_engine.log_probs([group.prompt_token_ids + answer.token_ids])[0][0][-len(answer) :]
        gaps += [abs(a - b) for a, b in zip(trainer, answer.logprobs, strict=True)]
    return max(gaps)


def main(model: str) -> None:
    rb.init(devices=2)

    vllm_engine = rb.InferenceEngine(model, executor="vllm")
    vllm_engine.build(tensor_parallel_size=1, data_parallel_size=1)
    # equal lengths, because train_step stacks the rows
    rollouts = vllm_engine.generate(PROMPTS, {"max_tokens": 16, "ignore_eos": True})

    vllm_engine.meta()  # release everything

    with init_empty_weights():
        module = MyQwenModel.from_pretrained(model)
    train_engine = rb.TrainEngine(module, executor="fsdp2")
    train_engine.build(tensor_parallel_size=2, colocate_with=vllm_engine)

    grad_acc_steps = 4
    input_ids = [[x.outputs[0].token_ids for x in rollouts] for _ in range(grad_acc_steps)]
    for step in range(grad_acc_steps):
        losses = train_engine.train_step(
            NeedParallel(input_ids[step]),  # split among the ranks
            grad_acc_steps,  # copied to all ranks
        )
        print(f"micro step {step}: loss on each rank {losses}")
    train_engine.optimizer_step()
    print(f"log-prob gap before the sync: {log_prob_gap(train_engine, rollouts):.2g}")

    vllm_engine.cuda("weights")  # only room for the weights
    train_engine.p2p_weight_sync(vllm_engine)
    vllm_engine.cuda("kv_cache")  # the replica can generate again

    again = vllm_engine.generate(PROMPTS, {"max_tokens": 16, "ignore_eos": True})
    print(f"log-prob gap after the sync:  {log_prob_gap(train_engine, again):.2g}")
    train_engine.cpu()
    rb.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(rb.tiny.ensure()))
