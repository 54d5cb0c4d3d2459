"""Language models of transformers with random weights: three that are trained, and one that generates text."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from bench.gpu_mix import torch_determinism
from bench.gpu_mix.torch_determinism import as_bytes, begin

sees_gpu, peak_mb = torch_determinism.sees_gpu, torch_determinism.peak_mb

_MASK = 103
_DOCUMENT_TOKENS = 64


def t5(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    documents = _merged_documents(size["seed"], size["documents"], size["rounds"])
    model = T5ForConditionalGeneration(
        T5Config(d_model=size["width"], num_layers=size["layers"], decoder_start_token_id=0, pad_token_id=0)
    ).to(device)
    random = np.random.default_rng(size["seed"])

    def batch() -> dict[str, Tensor]:
        chosen = [_text(documents, random, size["tokens"]) for _ in range(size["batch"])]
        inputs = torch.tensor(chosen)
        return {"input_ids": inputs, "labels": inputs[:, ::4].contiguous()}

    return _train(model, size["steps"], batch)


def _merged_documents(seed: int, count: int, rounds: int) -> list[list[int]]:
    """Return random texts in which the most frequent pairs of tokens are merged, as a tokenizer is made."""
    random = np.random.default_rng(seed)
    documents = (random.zipf(1.3, (count, _DOCUMENT_TOKENS)) % 20_000 + 2).tolist()
    for merged in range(30_000, 30_000 + rounds):
        pairs: Counter[tuple[int, int]] = Counter()
        for document in documents:
            pairs.update(itertools.pairwise(document))
        wanted = max(pairs, key=lambda pair: (pairs[pair], pair))
        documents = [_merge(document, wanted, merged) for document in documents]
    print(f"prepared {len(documents)} documents", flush=True)
    return documents


def _merge(document: list[int], pair: tuple[int, int], merged: int) -> list[int]:
    result: list[int] = []
    for token in document:
        if result and (result[-1], token) == pair:
            result[-1] = merged
        else:
            result.append(token)
    return result


def _text(documents: list[list[int]], random: np.random.Generator, length: int) -> list[int]:
    text: list[int] = []
    while len(text) < length:
        text += documents[random.integers(len(documents))]
    return text[:length]


def distilbert(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    config = DistilBertConfig(dim=size["width"], hidden_dim=size["width"] * 4, n_layers=size["layers"])
    model = DistilBertForMaskedLM(config).to(device)
    random = np.random.default_rng(size["seed"])

    def batch() -> dict[str, Tensor]:
        tokens = random.integers(1000, config.vocab_size, (size["batch"], size["tokens"]))
        is_masked = random.random(tokens.shape) < 0.15
        labels = torch.from_numpy(np.where(is_masked, tokens, -100))
        return {"input_ids": torch.from_numpy(np.where(is_masked, _MASK, tokens)), "labels": labels}

    return _train(model, size["steps"], batch)


def opt(size: Mapping[str, int]) -> Iterator[bytes]:
    device = begin(size["seed"])
    width = size["width"]
    config = OPTConfig(
        hidden_size=width, word_embed_proj_dim=width, ffn_dim=width * 4, num_hidden_layers=size["layers"]
    )
    model = OPTForCausalLM(config).to(device)
    random = np.random.default_rng(size["seed"])

    def batch() -> dict[str, Tensor]:
        tokens = torch.from_numpy(random.integers(4, config.vocab_size, (size["batch"], size["tokens"])))
        # Whole numbers: sums of the fractions that OPT assumes otherwise are not deterministic on a GPU.
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    return _train(model, size["steps"], batch)


def _train(model: PreTrainedModel, steps: int, batch: Callable[[], dict[str, Tensor]]) -> Iterator[bytes]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for step in range(steps):
        inputs = {name: value.to(model.device) for name, value in batch().items()}
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model(**inputs).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return as_bytes(model.state_dict().values())


@torch.no_grad()
def mistral(size: Mapping[str, int]) -> Iterator[bytes]:
    """Generate text for several batches of prompts: always the likeliest token."""
    device = begin(size["seed"])
    config = MistralConfig(
        hidden_size=size["width"],
        intermediate_size=size["width"] * 8 // 3,
        num_hidden_layers=size["layers"],
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=size["width"] // 16,
        sliding_window=None,
    )
    with device:  # so that the CPU does not draw the weights
        model = MistralForCausalLM(config).to(torch.bfloat16).eval()
    results = []
    for round_number in range(size["rounds"]):
        tokens = torch.randint(config.vocab_size, (size["batch"], size["prompt"]), device=device)
        written, last_scores = _generate(model, tokens, size["tokens"])
        print(f"round {round_number}: {written.shape[1]} tokens for each of {len(written)} prompts", flush=True)
        results += [written, last_scores]
    return as_bytes(results)


def _generate(model: nn.Module, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    kept, written = None, []
    for _ in range(count):
        output = model(input_ids=tokens, past_key_values=kept, use_cache=True, logits_to_keep=1)
        kept = output.past_key_values
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        written.append(tokens)
        tokens[0, 0].item()  # as a program that looks for the end of the text
    return torch.cat(written, dim=1), output.logits
