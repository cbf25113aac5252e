"""Train the bundled target: a Llama of 2.85 M parameters (8 layers, width 192, head_dim 32) on the docstring corpus.

``python -m benchmarks.train_demo_target -o DIR`` builds the tokenizer, trains, and writes a folder that
``AutoModelForCausalLM.from_pretrained`` reads. Two quiet cores do about 4,500 tokens a second; what the shipped weights
took and reached is in ``docs/bundled-target.md``.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from collectors.demo.corpus import conversations

VOCAB_SIZE = 1024
MAX_POSITIONS = 1024
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


def batches(samples: list[torch.Tensor], batch_tokens: int, seed: int, device: str) -> Iterator[torch.Tensor]:
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
        yield torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1).to(device)


def batch_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token cross-entropy in nats over every real token, and how many there are."""
    logits = model(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), use_cache=False).logits
    labels = ids[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=-1, reduction="sum")
    return loss, int((labels >= 0).sum())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, samples: list[torch.Tensor], device: str) -> float:
    """Nats per token over conversations the target never saw."""
    model.eval()
    total, tokens = 0.0, 0
    for ids in batches(samples, 16_384, 0, device):
        loss, count = batch_loss(model, ids)
        total, tokens = total + float(loss), tokens + count
    model.train()
    return total / tokens


def build_optimisers(model: LlamaForCausalLM, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: LlamaForCausalLM, samples: list[torch.Tensor], held_out: list[torch.Tensor], args: argparse.Namespace
) -> float:
    """Warm-up and cosine decay over ``args.epochs``; returns the final held-out loss."""
    device = args.device
    optimisers = build_optimisers(model, args.lr, args.weight_decay)
    per_epoch = sum(1 for _ in batches(samples, args.batch_tokens, 0, "cpu"))
    total = per_epoch * args.epochs
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, total)) for one in optimisers]
    started, loss, step = time.monotonic(), math.inf, 0
    for epoch in range(args.epochs):
        for ids in batches(samples, args.batch_tokens, args.seed + epoch, device):
            with torch.autocast(device.split(":")[0], torch.bfloat16):
                summed, count = batch_loss(model, ids)
            (summed / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimiser, schedule in zip(optimisers, schedules, strict=True):
                optimiser.step()
                schedule.step()
                optimiser.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0:
                _say(f"step {step}/{total}  loss {float(summed) / count:.3f}  {time.monotonic() - started:.0f} s")
        if epoch == args.epochs - 1 or epoch % args.report_every == 0:
            loss = held_out_loss(model, held_out, device)
            _say(f"epoch {epoch + 1}/{args.epochs}  held-out {loss:.3f}  {time.monotonic() - started:.0f} s")
            if args.checkpoints:
                model.save_pretrained(args.out / "checkpoint")
    return loss


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _rate(step: int, total: int) -> float:
    warm = max(1, total // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def main() -> None:
    """Build, train and save the bundled target."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="conversations written by collectors.demo.corpus")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--report-every", type=int, default=1)
    parser.add_argument("--checkpoints", action="store_true", help="save the weights at every report")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.corpus:
        rows = [json.loads(line) for line in args.corpus.read_text(encoding="utf-8").splitlines()]
    else:
        rows = conversations()
    tokenizer = build_tokenizer(rows)
    samples = tokenise(tokenizer, rows)
    held_out = samples[::40]
    kept = [sample for i, sample in enumerate(samples) if i % 40]
    model = build_model(tokenizer).to(args.device)
    loss = train(model, kept, held_out, args)
    model.to("cpu", torch.bfloat16).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(args.out)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(args.out)
    tokens = sum(len(sample) for sample in samples)
    sys.stdout.write(f"{tokens:,} tokens, held-out loss {loss:.3f} nats per token, written to {args.out}\n")


if __name__ == "__main__":
    main()
