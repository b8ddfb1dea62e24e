"""What a run will do and need, before it starts: resolved config, batch arithmetic, memory of one device.

    python train.py --config rl_config.json --plan --processes 56 --device-gb 96 [--json]

The four phases of a step never overlap; an item counts where it is alive, and the largest phase is the peak.
N parameters, N_b of them in one block and N_o outside; B blocks; D = trainer.fsdp_size processes share the states
("sharded" if D > 1); b bytes of model.dtype; M max_model_len; C = 2 B kv_heads head_dim b, keys and values of a token;
T = max(micro_batch_tokens, M) tokens of a micro-batch, as a longer row is one of its own. Bytes of a device:

    all       weights, gradients, AdamW moments  4N/D, 4N/D, 8N/D; reference 4N/D with a KL term (when sharded, its
                                                 embedding and head stay gathered: N_o b)
              gradient buckets   4N when several processes hold whole gradients (DDP keeps a copy)
              sampler replica    bN, whole; none where a float32 sampler is the module that trains
    sample    key-value cache    batch_slots M C: the worst case, every slot full
              cache growth       one layer's keys, copied when columns are added: cache / 2B
              prefill            P = rollout.PREFILL tokens at once: P b (3 max(I, A) + 4H) inside one block; its mask
                                 P M (b + 1); the keys and values seen, W = max(P, M) tokens of one layer, gathered
                                 and repeated for every head: 2 W b head_dim (kv_heads + heads)
              sampler logits     batch_slots V 41, or 24 without top-k and top-p
    forward   activations        B blocks (`block_bytes`, or 4 T H if checkpointed) + 8 T H of the last norm
              autocast copies    2 (B N_b + V H), the weights in bfloat16; none when sharded
              logprob chunk      512 V 4 x 2: logits, then probabilities and gradient, and all logprobs
              head gradients     (V + 8192) H 4 + 3 T H 4: the sum, a part's product, hidden states
    backward  activations; block recomputed (gradient checkpointing), else the autocast copies live on;
              gradients in a block  T (2I b + 2H 4)
    both      gathered layers    when sharded, (2 N_b + N_o) (b + 4): this block, the next, embedding and
                                 head, with their gradients
    step      AdamW temporary    4N/D, what its multi-tensor form needs on a GPU

Leaves out: CUDA context and communication buffers (1 to 2 GB), fragmentation, offloading to the host, a copy of a
prompt's keys and values for each of its responses in a micro-batch.
"""

import json
import logging
import sys
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import warmstart
from config import Config, batch_plan, to_dict
from loss import VOCABULARY_PART
from quarantine import leave_out
from rollout import PREFILL
from tasks import load_tasks

GB = 10**9
CHUNK = 512  # tokens, the default of loss.fused_policy_loss
PHASES = ("sample", "forward", "backward", "step")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def print_plan(config: Config, as_json: bool, processes: int | None = None, device_gb: float | None = None,
               model_config: str | None = None) -> None:
    """Print as text or one JSON object; `memory` is null, and stderr says why, if the model cannot be read.

    processes: None for trainer.fsdp_size. model_config: a transformers config.json to count in place of `model.path`.
    ValueError: a bad argument.
    """
    if processes is None:
        processes = config.trainer.fsdp_size
    if processes < 1:
        raise ValueError(f"--processes: expected an integer >= 1, found {processes}")
    if device_gb is not None and not 0 < device_gb < float("inf"):
        raise ValueError(f"--device-gb: expected a number > 0, found {device_gb}")
    tasks = leave_out(load_tasks(config.data.train, config.data.limit), config.data.quarantine)
    numbers = batch_plan(config, processes, len(tasks))
    try:
        memory = memory_plan(config, processes, device_gb, model_config)
    except ValueError as error:
        if model_config is not None:
            raise
        memory = None
        print(f"memory is not planned: {error}; --model-config FILE.json can stand in", file=sys.stderr)
    if as_json:
        print(json.dumps({"config": to_dict(config), "batch": numbers, "memory": memory}))
        return
    print(json.dumps(to_dict(config), indent=2))
    print("  ".join(f"{name} {number}" for name, number in numbers.items()))
    if memory is not None:
        print(table(memory))


def memory_plan(config: Config, processes: int, device_gb: float | None,
                model_config: str | None = None) -> dict:
    """Memory of one device, in bytes and in GB of 10**9; the formulas stand at the top of this file.

    -> `items` (name, bytes, gb, phases), `phases_gb`, `peak_gb`, `fits` and `largest_batch_slots` (0: none
    would do), both None without `device_gb`. ValueError: the model cannot be read or is laid out differently.
    """
    model, rollout, shape = config.model, config.rollout, read_shape(config.model.path, model_config)
    whole, block, layers = shape["parameters"], shape["block_parameters"], shape["num_hidden_layers"]
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    size, low = (2, True) if model.dtype == "bfloat16" else (4, False)
    share, sharded = -(-whole // config.trainer.fsdp_size), config.trainer.fsdp_size > 1
    longest, budget = rollout.max_model_len, config.trainer.micro_batch_tokens
    # rows that differ in length need a mask, and the longest of two or more takes half of the budget at most
    cases = [(max(budget, longest), longest, False), (budget, min(longest, budget // 2), True)]
    saved, tokens = max((block_bytes(shape, model.dtype, model.attn_implementation, *case), case[0])
                        for case in cases)
    slot = longest * layers * 2 * shape["num_key_value_heads"] * shape["head_dim"] * size
    logit = vocab * (24 if rollout.top_k < 0 and rollout.top_p >= 1 else 41)
    wide = max(inner, shape["num_attention_heads"] * shape["head_dim"])
    heads = shape["num_key_value_heads"] + shape["num_attention_heads"]
    prefill = (PREFILL * size * (3 * wide + 4 * hidden) + PREFILL * longest * (size + 1)
               + 2 * max(PREFILL, longest) * size * shape["head_dim"] * heads)
    recompute, both = model.gradient_checkpointing, "forward backward"
    outside = whole - layers * block  # embedding, last norm and head
    reference = (4 * share + sharded * size * outside) if config.algorithm.kl_loss_coef > 0 else 0
    rows = [
        ("weights", 4 * share, "all"),
        ("gradients", 4 * share, "all"),
        ("AdamW moments", 8 * share, "all"),
        ("reference model", reference, "all"),
        ("gradient buckets", 4 * whole if processes > 1 and not sharded else 0, "all"),
        ("sampler replica", size * whole if low or sharded else 0, "all"),
        ("key-value cache", rollout.batch_slots * slot, "sample"),
        ("cache growth", rollout.batch_slots * slot // (2 * layers), "sample"),
        ("prefill", prefill, "sample"),
        ("sampler logits", rollout.batch_slots * logit, "sample"),
        ("activations", 8 * tokens * hidden + layers * (4 * tokens * hidden if recompute else saved), both),
        ("autocast copies", 2 * (layers * block + vocab * hidden) if low and not sharded else 0,
         "forward" if recompute else both),
        ("logprob chunk", 2 * CHUNK * vocab * 4, "forward"),
        ("head gradients", (vocab + VOCABULARY_PART) * hidden * 4 + 3 * tokens * hidden * 4, "forward"),
        ("block recomputed", saved if recompute else 0, "backward"),
        ("gradients in a block", tokens * (2 * inner * size + 2 * hidden * 4), "backward"),
        ("gathered layers", (2 * block + outside) * (size + 4) if sharded else 0, both),
        ("AdamW temporary", 4 * share, "step"),
    ]
    items = [{"name": name, "bytes": count, "gb": count / GB,
              "phases": list(PHASES) if alive == "all" else alive.split()}
             for name, count, alive in rows if count]
    totals = {phase: sum(item["bytes"] for item in items if phase in item["phases"]) for phase in PHASES}
    peak, fits, slots = max(totals.values()), None, None
    if device_gb is not None:
        room = device_gb * GB
        fits = peak <= room
        per_slot = slot + slot / (2 * layers) + logit
        free = room - totals["sample"] + rollout.batch_slots * per_slot
        slots = max(0, int(free // per_slot)) if all(totals[phase] <= room for phase in PHASES[1:]) else 0
    return {"parameters": whole, "processes": processes, "fsdp_size": config.trainer.fsdp_size, "device_gb": device_gb,
            "items": items, "phases_gb": {phase: count / GB for phase, count in totals.items()},
            "peak_gb": peak / GB, "fits": fits, "largest_batch_slots": slots}


def block_bytes(shape: dict, dtype: str, attention: str, tokens: int, longest: int, padded: bool) -> int:
    """Bytes that autograd keeps of one Qwen3 block: `tokens`, padding included, in rows of `longest`.

    Of a token, with A = heads head_dim, K = kv_heads head_dim; autocast keeps residuals and norms float32:
        two norms                          2 x (input 4H + normalised 4H)
        inputs of q, k, v and of gate, up  2H b, in bfloat16 5H b, as each product casts its own
        norms of q and k                   (input 4 + normalised b) (A + K)
        attention                          q, output: 2A b; k, v: 2K b, or 2A b if repeated for query heads
        MLP                                4I b: gate, its activation, up, their product
    Of a pair of positions: the mask of padded rows b, or eager's softmax (and bfloat16 copy) of each head.
    A block that does not normalise q and k (Llama) keeps less.
    """
    b, hidden, heads = (2 if dtype == "bfloat16" else 4), shape["hidden_size"], shape["num_attention_heads"]
    queries, keys = heads * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    repeated = attention == "eager" or attention == "sdpa" and padded
    token = (16 + (5 * b if b == 2 else 2 * b)) * hidden + (4 + b) * (queries + keys) + 2 * b * queries
    token += 2 * b * (queries if repeated else keys) + 4 * b * shape["intermediate_size"]
    pair = {"eager": heads * (4 if b == 4 else 6), "sdpa": b * padded}[attention]
    return tokens * token + tokens * longest * pair


def read_shape(path: str, model_config: str | None = None) -> dict:
    """The sizes that a transformers config names, and the parameters, counted on the meta device."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a missing hub is worth one line, not ten
    where = f"model.path: {path!r}" if model_config is None else f"--model-config: {model_config!r}"
    if model_config is not None and not Path(model_config).is_file():
        raise ValueError(f"{where}: no such file")
    try:
        if model_config is None and path == "warmstart":
            hf = Qwen3Config(vocab_size=warmstart.VOCABULARY, tie_word_embeddings=True, **warmstart.SHAPE)
        else:
            hf = AutoConfig.from_pretrained(model_config or path)
        with torch.device("meta"):
            counted = {name: p.numel() for name, p in AutoModelForCausalLM.from_config(hf).named_parameters()}
    except (OSError, ValueError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{where}: no decoder's config: {str(error).strip().splitlines()[0]}") from error
    values, block = hf.to_dict(), sum(count for name, count in counted.items() if ".layers.0." in name)
    if not block or any(type(values.get(key)) is not int for key in SIZES):
        raise ValueError(f"{where}: {hf.model_type} is not laid out as Qwen3 and Llama, which are known")
    heads = values["num_attention_heads"]
    return {key: values[key] for key in SIZES} | {
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "parameters": sum(counted.values()), "block_parameters": block}


def table(memory: dict) -> str:
    layout = f"shared by {memory['fsdp_size']}" if memory["fsdp_size"] > 1 else "whole on each"
    lines = [f"\nmemory in GB (10^9 bytes) of one of {memory['processes']} devices; "
             f"{memory['parameters']:,} parameters, {layout}",
             f"{'':22}" + "".join(f"{phase:>10}" for phase in PHASES)]
    for item in memory["items"]:
        figure = f"{item['gb']:10.3f}"
        lines.append(f"{item['name']:22}" + "".join(figure if phase in item["phases"] else " " * 10
                                                    for phase in PHASES).rstrip())
    lines.append(f"{'sum':22}" + "".join(f"{memory['phases_gb'][phase]:10.3f}" for phase in PHASES))
    if memory["device_gb"] is None:
        return "\n".join([*lines, f"peak {memory['peak_gb']:.3f} GB; --device-gb asks whether that fits"])
    verdict = "fits" if memory["fits"] else "does NOT fit"
    return "\n".join([*lines, f"peak {memory['peak_gb']:.3f} GB {verdict} in {memory['device_gb']:g} GB; "
                      f"largest rollout.batch_slots that fits: {memory['largest_batch_slots'] or 'none'}"])
