"""warmstart.py: what the training text says, what the labels cover, what the tokenizer keeps."""

import random

import torch

import warmstart
from generator import operations, write_solution
from tasks import load_tasks

TASKS = load_tasks("generated:chains:warmstart:60")


def code_of(messages):
    return messages[-1]["content"].removeprefix("```python\n").removesuffix("\n```") + "\n"


def test_step_by_step_replies_are_right_and_some_one_liners_forget_an_operation():
    rng = random.Random(0)
    forgot = complete = 0
    for task in TASKS:
        family, chain = operations(task)
        code = code_of(warmstart.conversation(task, rng))
        if "#" in code:
            assert code == write_solution(family, chain, "steps")
        elif code == write_solution(family, chain, "one_liner"):
            complete += 1
        else:
            shorter = [chain[:i] + chain[i + 1:] for i in range(len(chain))]
            assert code in [write_solution(family, part, "one_liner") for part in shorter]
            forgot += 1
    assert forgot > 5 and complete > 5


def test_labels_are_the_reply_and_its_end_alone():
    rng = random.Random(0)
    conversations = [warmstart.conversation(task, rng) for task in TASKS[:3]]
    tokenizer = warmstart.train_tokenizer(conversations)
    ids, labels = warmstart.collate(conversations, tokenizer)
    assert ids.shape == labels.shape
    for messages, row, label in zip(conversations, ids, labels, strict=True):
        trained = row[label >= 0]
        assert torch.equal(trained, label[label >= 0])
        assert trained[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(trained[:-1]) == messages[-1]["content"]
        assert (row[label >= 0] != tokenizer.pad_token_id).all()


def test_tokenizer_gives_the_text_back_and_splits_digits():
    conversations = [warmstart.conversation(task, random.Random(0)) for task in TASKS]
    tokenizer = warmstart.train_tokenizer(conversations)
    assert len(tokenizer) <= warmstart.VOCABULARY
    for text in ("def solve(x: int) -> int:\n    return x + 12\n", "é ≤ 数\n\t~"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("1234").input_ids) == 4
