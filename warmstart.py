"""The cold start of the laptop run: a small Qwen3 and its tokenizer, supervised on generated tasks.

    python warmstart.py --out models/warmstart-seed0

Each reply of its training text solves a task of the `warmstart` split either as a nested one-liner or step by step,
at random, so the policy that comes out writes both. It is far better at the second, and has not been told so: that is
what reinforcement learning can find out.

Leaves out: everything a language model should be able to do besides.
"""

import argparse
import dataclasses
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent import messages_for
from checkpoint import write_atomically
from generator import operations, write_solution
from tasks import load_tasks

TASKS = "generated:chains:warmstart:2000"
STYLES = ("one_liner", "steps")
VOCABULARY = 512
STEPS = 300
BATCH = 32
LEARNING_RATE = 3e-3
PAD, END = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def resolve(config, accelerator):
    """The config with `model.path` "warmstart" replaced by a folder, which the main process fills if it is not there."""
    if config.model.path != "warmstart":
        return config
    folder = Path("models") / f"warmstart-seed{config.trainer.seed}"
    if accelerator.is_main_process and not folder.exists():
        build(folder, config.trainer.seed)
    accelerator.wait_for_everyone()
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


def build(folder: Path, seed: int):
    """Train tokenizer and model and write them to `folder`, whole or not at all."""
    rng = random.Random(seed)
    tasks = load_tasks(TASKS)
    conversations = [conversation(task, rng) for task in tasks]
    tokenizer = train_tokenizer(conversations)
    model = new_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    progress = tqdm(range(STEPS), desc="warm start", unit="step", leave=False)
    for step in progress:
        warm = min(1.0, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm * (1 - step / STEPS)
        ids, labels = collate([conversation(task, rng) for task in rng.sample(tasks, BATCH)], tokenizer)
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        trained = labels[:, 1:] >= 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[trained]), labels[:, 1:][trained])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")

    def write(temporary):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    write_atomically(folder, write)
    print(f"warm start: {folder}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
          f"final loss {loss.item():.3f}")


def conversation(task, rng) -> list[dict]:
    code = write_solution(*operations(task), rng.choice(STYLES))
    return messages_for(task) + [{"role": "assistant", "content": f"```python\n{code.rstrip()}\n```"}]


def train_tokenizer(conversations) -> PreTrainedTokenizerFast:
    """Byte-level BPE, digits one by one, on the conversations themselves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d|\n *|,|[^\d\n,]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|user|>", "<|assistant|>"]
    tokenizer.train_from_iterator(
        (message["content"] for messages in conversations for message in messages),
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[PAD, END, *roles], show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
                                   additional_special_tokens=roles)


def new_model(tokenizer, seed) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=160, intermediate_size=448, num_hidden_layers=4, num_attention_heads=5,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.06, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None))


def collate(conversations, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (B, L) and labels (B, L), right-padded; labels are -100 outside the reply and its end."""
    rows = []
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        reply_ids = tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        rows.append((prompt_ids, reply_ids))
    longest = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for row, (prompt, reply) in enumerate(rows):
        ids[row, :len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[row, len(prompt):len(prompt) + len(reply)] = torch.tensor(reply)
    return ids, labels


def main():
    parser = argparse.ArgumentParser(description="Build the small cold-start model.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        print(f"warmstart.py: --out: {args.out} exists already", file=sys.stderr)
        sys.exit(2)
    build(args.out, args.seed)


if __name__ == "__main__":
    main()
