"""Train the bundled target: a Llama of 2.85 M parameters (8 layers, width 192, head_dim 32) on the docstring corpus.

``python -m benchmarks.train_demo_target -o DIR`` builds the tokenizer, trains, and writes a folder that
``AutoModelForCausalLM.from_pretrained`` reads. Two quiet cores do about 4,500 tokens a second; what the shipped weights
took and reached is in ``docs/bundled-target.md``.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.report import progress
from collectors.demo.corpus import conversations

VOCAB_SIZE = 1024
MAX_POSITIONS = 1024
RATE = 3e-3
SPECIAL = {"pad": "<|pad|>", "bos": "<|begin|>", "end": "<|end|>"}
ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Row = dict[str, list[dict[str, str]]]


def build_tokenizer(rows: list[Row]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the corpus, with a chat template that marks what the assistant says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL.values(), *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for row in rows for m in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL["bos"],
        eos_token=SPECIAL["end"],
        pad_token=SPECIAL["pad"],
        additional_special_tokens=ROLE_TOKENS,
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh target; head_dim 32 is the smallest that vLLM's CPU attention runs."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def tokenise(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> list[torch.Tensor]:
    """One int64 tensor [T] per conversation, at most MAX_POSITIONS tokens."""
    ids = [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows]
    return [torch.tensor(one[:MAX_POSITIONS]) for one in ids]


def batches(samples: list[torch.Tensor], batch_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Right-padded id batches [B, T] of neighbours in length, in a shuffled order; -1 marks padding."""
    generator = torch.Generator().manual_seed(seed)
    jitter = torch.rand(len(samples), generator=generator) * 16
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]) + float(jitter[i]))
    groups: list[list[int]] = [[]]
    for index in order:
        if groups[-1] and len(samples[index]) * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(index)
    for g in torch.randperm(len(groups), generator=generator).tolist():
        chosen = [samples[i] for i in groups[g]]
        yield torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)


def batch_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token cross-entropy in nats over every real token, and how many there are."""
    logits = model(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), use_cache=False).logits
    labels = ids[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=-1, reduction="sum")
    return loss, int((labels >= 0).sum())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, samples: list[torch.Tensor]) -> float:
    """Nats per token over conversations the target never saw."""
    total, tokens = 0.0, 0
    for ids in batches(samples, 16_384, 0):
        loss, count = batch_loss(model, ids)
        total, tokens = total + float(loss), tokens + count
    return total / tokens


def build_optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, samples: list[torch.Tensor], epochs: int, batch_tokens: int) -> None:
    """Warm-up and cosine decay over the epochs."""
    optimisers = build_optimisers(model)
    total = epochs * sum(1 for _ in batches(samples, batch_tokens, 0))
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, total)) for one in optimisers]
    steps = (ids for epoch in range(epochs) for ids in batches(samples, batch_tokens, epoch))
    for step, ids in enumerate(steps, 1):
        with torch.autocast("cpu", torch.bfloat16):
            summed, count = batch_loss(model, ids)
        (summed / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0:
            progress(f"step {step}/{total}  loss {float(summed) / count:.3f}")


def _rate(step: int, total: int) -> float:
    warm = max(1, total // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def main() -> None:
    """Build, train and save the bundled target."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = conversations()
    tokenizer = build_tokenizer(rows)
    samples = tokenise(tokenizer, rows)
    model = build_model(tokenizer)
    train(model, [sample for i, sample in enumerate(samples) if i % 40], args.epochs, args.batch_tokens)
    loss = held_out_loss(model, samples[::40])
    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(args.out)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(args.out)
    tokens = sum(len(sample) for sample in samples)
    progress(f"{tokens:,} tokens, held-out loss {loss:.3f} nats per token, written to {args.out}")


if __name__ == "__main__":
    main()
