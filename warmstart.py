"""The cold start of the laptop run: a small Qwen3 and its tokenizer, supervised on generated tasks.

    python warmstart.py --out models/warmstart-seed0

The training text is of uneven quality, as such text is. A reply works either step by step, always right, or in one
nested line, written in haste: more often than not it forgets one of the operations. The policy that comes out writes
both, and nothing has told it which is worth more. That is for reinforcement learning to find out.

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
ONE_LINERS = 0.5  # share of the replies
SLIPS = 0.6  # share of the one-liners that forget an operation
VOCABULARY = 512
STEPS = 700
BATCH = 16
LEARNING_RATE = 2e-3
SHAPE = {"hidden_size": 176, "intermediate_size": 448, "num_hidden_layers": 3, "num_attention_heads": 5,
         "num_key_value_heads": 1, "head_dim": 32,
         "initializer_range": 0.08}  # at the usual 0.02 a model this small copies constants far later
PAD, END = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def resolve(config, accelerator):
    """The config with `model.path` "warmstart" replaced by a folder, which the main process fills if it is missing."""
    if config.model.path != "warmstart":
        return config
    folder = Path("models") / f"warmstart-seed{config.trainer.seed}"
    if accelerator.is_main_process and not folder.exists():
        build(folder, config.trainer.seed)
    accelerator.wait_for_everyone()
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


def build(folder: Path, seed: int, source=TASKS, steps=STEPS, batch=BATCH, **shape):
    """Train tokenizer and model and write them to `folder`, whole or not at all. `shape` replaces keys of SHAPE."""
    rng = random.Random(seed)
    tasks = load_tasks(source)
    tokenizer = train_tokenizer([conversation(task, rng) for task in tasks])
    model = new_model(tokenizer, seed, SHAPE | shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    progress = tqdm(range(steps), desc="warm start", unit="step", leave=False)
    waiting = []
    for step in progress:
        if not waiting:  # batches of replies that are about equally long, in random order
            pool = sorted((conversation(task, rng) for task in rng.sample(tasks, min(8 * batch, len(tasks)))), key=size)
            waiting = [pool[start:start + batch] for start in range(0, len(pool), batch)]
            rng.shuffle(waiting)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        ids, labels = collate(waiting.pop(), tokenizer)
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
    family, chain = operations(task)
    style = "one_liner" if rng.random() < ONE_LINERS else "steps"
    if style == "one_liner" and rng.random() < SLIPS:
        forgotten = rng.randrange(len(chain))
        chain = chain[:forgotten] + chain[forgotten + 1:]
    code = write_solution(family, chain, style)
    return messages_for(task) + [{"role": "assistant", "content": f"```python\n{code.rstrip()}\n```"}]


def size(messages) -> int:
    return sum(len(message["content"]) for message in messages)


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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END,
                                   chat_template=CHAT_TEMPLATE, additional_special_tokens=roles)


def new_model(tokenizer, seed, shape) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, **shape))


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
