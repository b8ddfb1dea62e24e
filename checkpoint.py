"""Load the start model; save, find, resume and prune checkpoints; export in the Hugging Face layout.

A checkpoint is a folder `checkpoints/global_step_N` with the states of model and optimizer as
torch.distributed.checkpoint writes them: each process its own part, to be read by any number of processes, sharded or
not. Every folder is written under a hidden temporary name, synced to the disk and renamed, so a folder that has its
name is complete; older ones are pruned only after that. The data order and all random numbers are functions of the
seed and the step, so the step number is the only other thing to remember: it is the name.

Leaves out: asynchronous saving, uploading.
"""

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(model_config):
    """(model in float32, tokenizer) of `model.path`, a folder or a Hub id, with every dropout at 0.

    Sampler and trainer must be one policy, so dropout is off in both. ValueError when the model cannot be had.
    """
    path = model_config.path
    try:
        hf_config = AutoConfig.from_pretrained(path)
        for key in hf_config.to_dict():
            if key.endswith(("dropout", "pdrop")):
                setattr(hf_config, key, 0.0)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, config=hf_config, dtype=torch.float32,
                                                     attn_implementation=model_config.attn_implementation)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.path: no model can be loaded from {path!r}: {reason}") from error
    if model_config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(model_config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"model.chat_template: {model_config.chat_template}: {error.strerror}") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"model.chat_template: the tokenizer of {path!r} has none: name a .jinja file")
    refuse_unusual_head(model, path)
    if model_config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.eval(), tokenizer


def refuse_unusual_head(model, path):
    """ValueError when logits are not hidden @ head.T: a bias, a scale or a cap would be missing from the loss."""
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if not torch.allclose(model(input_ids=ids).logits, hidden @ model.get_output_embeddings().weight.T, atol=1e-3):
            raise ValueError(f"model.path: {path!r} does more to its logits than multiply by the head, which the fused "
                             "loss would miss")


def eos_ids(model, tokenizer) -> set[int]:
    """Every id that ends a reply: those of the generation config, the model's config and the tokenizer."""
    found = set()
    for ids in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, list) else [ids])
    found.discard(None)
    if not found:
        raise ValueError(f"model.path: {model.config.name_or_path!r} names no end-of-sequence token")
    return found


def write_atomically(path: Path, write):
    """`write(temporary folder)`, sync, rename to `path`. What was at `path` is replaced."""
    temporary = path.with_name(f".writing_{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    publish(temporary, path)


def publish(temporary: Path, path: Path):
    for file in temporary.rglob("*"):
        sync(file)
    sync(temporary)
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)
    sync(path.parent)


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(run_dir: Path, step: int, policy, optimizer, accelerator, keep: int):
    """Every rank calls this; afterwards `checkpoints/global_step_{step}` is complete and `keep` are left."""
    folder = run_dir / "checkpoints"
    if (folder / f"global_step_{step}").exists():  # the same state, as a step is reached in one way only
        return
    temporary = folder / f".writing_global_step_{step}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    dcp.save(training_state(policy, optimizer), checkpoint_id=temporary, no_dist=accelerator.num_processes == 1)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        publish(temporary, folder / f"global_step_{step}")
        for _, old in checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def training_state(policy, optimizer) -> dict:
    model, optimizer = get_state_dict(policy, optimizer)
    return {"model": model, "optimizer": optimizer}


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    found = (run_dir / "checkpoints").glob("global_step_*")
    return sorted((int(folder.name.removeprefix("global_step_")), folder) for folder in found)


def resume(run_dir: Path, policy, optimizer, accelerator) -> int:
    """Load the newest checkpoint and cut logs and traces back to it. -> its step, 0 when there is none.

    ValueError when it cannot be read or is that of another model; nothing has been cut back then.
    """
    found = checkpoints(run_dir)
    step, folder = found[-1] if found else (0, None)
    if found:
        state = training_state(policy, optimizer)
        try:
            dcp.load(state, checkpoint_id=folder, no_dist=accelerator.num_processes == 1)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise ValueError(f"trainer.run_dir: {folder} cannot be resumed from: {reason}") from error
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if accelerator.is_main_process:
        for half in (run_dir / "checkpoints").glob(".writing_*"):
            print(f"{half}: was never finished, removed")
            shutil.rmtree(half)
        rewind(run_dir, step)
    accelerator.wait_for_everyone()
    return step


def rewind(run_dir: Path, step: int):
    """Drop the metric lines and trace shards of steps after `step`: they will be written again."""
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        # a run that was killed may have left half a line; a run that starts again writes its step 0 again
        kept = [line for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True)
                if step > 0 and line.endswith("\n") and json.loads(line)["step"] <= step]
        temporary = run_dir / ".writing_metrics.jsonl"
        temporary.write_text("".join(kept), encoding="utf-8")
        sync(temporary)
        temporary.replace(metrics)
    for shard in (run_dir / "traces").glob("step_*.parquet"):
        if int(shard.stem.removeprefix("step_")) > step:
            shard.unlink()


def export(run_dir: Path, step: int, model, tokenizer):
    """`exports/global_step_{step}`: weights, tokenizer with its chat template, the resolved rl_config.json."""
    def write(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.copy(run_dir / "rl_config.json", folder)

    write_atomically(run_dir / "exports" / f"global_step_{step}", write)
