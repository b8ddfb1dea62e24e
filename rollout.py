"""The sampler: prompt ids in, sampled tokens and their logprobs out, on any transformers decoder.

Continuous batching over a fixed number of slots. A prompt is prefilled once and its key-value cache is copied to the
slot of each sample of its group; a sample leaves its slot when it ends and a waiting one takes the place; every decode
step is one batched forward over the occupied slots. What is drawn at one position depends on one uniform number,
a function of (key, position) alone, so the tokens do not depend on the slots, the order or the number of processes.

    sampler = Sampler(model, eos_ids={2}, config=config.rollout)
    completions = sampler.run([Request(prompt_ids, key=(seed, step, group, sample)), ...])

Inside a coroutine, `await sampler.sample(request)` does the same while `sampler.drive()` runs (agent.py).

Shapes: R occupied slots, L cached columns, V vocabulary.
Leaves out: paged memory, chunked prefill, speculation, penalties; temperature, top-k and top-p are the whole policy.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

GROW = 128  # columns added when the longest row outgrows the cache


@dataclass(eq=False)
class Request:
    """One sample to draw: the prompt, and the key (ints) that its random numbers are a function of."""
    prompt_ids: list[int]
    key: tuple[int, ...]


@dataclass
class Completion:
    """Sampled ids (the EOS that ended them included) with, per token, what the sampler knew of the policy there.

    logprobs and entropies are of softmax(logits / temperature) in nats; truncated_mass is the probability that top-k
    and top-p cut off. `truncated`: no EOS came before `max_new_tokens` or `max_model_len`, which `stopped_by` names.
    """
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    truncated_mass: list[float] = field(default_factory=list)
    stopped_by: str = ""  # "eos" | "max_new_tokens" | "max_model_len"

    @property
    def truncated(self) -> bool:
        return self.stopped_by != "eos"


def uniforms(key, n) -> np.ndarray:
    """n numbers in [0, 1), float64: a function of the key, the same on every machine."""
    return np.random.default_rng(key).random(n)


def warp(logits, top_k, top_p) -> torch.Tensor:
    """Probabilities (R, V) after top-k, then top-p, not renormalised: what is cut is 0. Off at -1 and 1.0."""
    probs = logits.softmax(-1)
    if top_k < 0 and top_p >= 1:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k > 0:
        keep[:, top_k:] = False
    if top_p < 1:
        nucleus = ranked * keep
        nucleus = nucleus / nucleus.sum(-1, keepdim=True)
        keep &= nucleus.cumsum(-1) - nucleus < top_p  # the token that crosses top_p stays (Holtzman et al. 2020)
    return probs * torch.zeros_like(keep).scatter(-1, order, keep)


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer, (slots, heads, L, head_dim): row r writes at its own column `at[r]`."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def update(self, key_states, value_states, *_args, **_kwargs):
        rows, at = self.cache.rows, self.cache.at
        self.keys[rows, :, at] = key_states[:, :, 0]
        self.values[rows, :, at] = value_states[:, :, 0]
        n, longest = len(rows), self.cache.longest
        return self.keys[:n, :, :longest], self.values[:n, :, :longest]

    def write(self, slot, keys, values):
        """Put a prompt's (1, heads, length, head_dim) at the start of a slot, growing the columns if needed."""
        length = keys.shape[2]
        if not self.is_initialized:
            shape = (self.cache.slots, keys.shape[1], 0, keys.shape[3])
            self.keys, self.values, self.is_initialized = keys.new_zeros(shape), values.new_zeros(shape), True
        self.reserve(length)
        self.keys[slot, :, :length] = keys[0]
        self.values[slot, :, :length] = values[0]

    def reserve(self, length):
        missing = length - self.keys.shape[2]
        if missing > 0:
            extra = -(-missing // GROW) * GROW
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def move(self, source, target, length):
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]


class _SlotCache(Cache):
    """The layers, and for the coming decode step: the occupied rows, the column of each, the longest of all."""

    def __init__(self, n_layers, slots):
        self.slots, self.rows, self.at, self.longest = slots, None, None, 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(n_layers)])

    def place(self, lengths):
        """lengths (R,): tokens already cached in each occupied slot; the step writes one more to each."""
        self.rows, self.at = torch.arange(len(lengths), device=lengths.device), lengths
        self.longest = int(lengths.max()) + 1
        for layer in self.layers:
            layer.reserve(self.longest)


@dataclass(eq=False)
class _Row:
    request: Request
    completion: Completion
    uniforms: np.ndarray
    limit: int           # tokens that may be sampled
    future: asyncio.Future | None = None


class Sampler:
    """Draws completions from `model`; `config` is the rollout section of the configuration.

    The model is used as it is (device, dtype) and only put into eval mode. ValueError: a model with sliding-window
    attention, whose prompt cache holds the window alone, or with fewer positions than `max_model_len`; a prompt that
    leaves no room.
    `stop` is asked between decode steps; when it answers True, InterruptedError is raised and nothing is lost but the
    samples under way.
    """

    def __init__(self, model, eos_ids, config, stop=lambda: False):
        if any(DynamicCache(config=model.config).is_sliding):
            raise ValueError(f"model.path: {model.config.name_or_path!r} has sliding-window attention, which the "
                             "sampler cannot decode")
        positions = model.config.max_position_embeddings
        if config.max_model_len > positions:
            raise ValueError(f"rollout.max_model_len: {config.max_model_len} is more than the {positions} positions of "
                             f"{model.config.name_or_path!r}")
        self.model, self.eos_ids, self.config, self.stop = model, frozenset(eos_ids), config, stop
        self.waiting, self.active = deque(), []
        self.prefix = None  # (prompt_ids, cache, last logits) of the prompt prefilled last

    def run(self, requests: list[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        async def all_of_them():
            driver = asyncio.create_task(self.drive())
            try:
                return await asyncio.gather(*(self.sample(request) for request in requests), driver)
            finally:
                driver.cancel()

        return asyncio.run(all_of_them())[:-1]

    async def sample(self, request: Request) -> Completion:
        limit = min(self.config.max_new_tokens, self.config.max_model_len - len(request.prompt_ids))
        if limit < 1 or not request.prompt_ids:
            raise ValueError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room in "
                             f"max_model_len {self.config.max_model_len}")
        row = _Row(request, Completion(), uniforms(request.key, limit), limit,
                   asyncio.get_running_loop().create_future())
        self.waiting.append(row)
        return await row.future

    async def drive(self):
        """Decode until nothing waits and nothing is active, giving way to other coroutines at every step."""
        await asyncio.sleep(0)
        self.model.eval()
        cache = _SlotCache(self.model.config.num_hidden_layers, self.config.batch_slots)
        try:
            while self.waiting or self.active:
                if self.stop():
                    raise InterruptedError("sampling was interrupted")
                self._step(cache)
                await asyncio.sleep(0)
        finally:  # the weights change before the next run: no row and no prefix may outlive this one
            self.waiting.clear()
            self.active.clear()
            self.prefix = None

    @torch.inference_mode()
    def _step(self, cache):
        joining = []
        while self.waiting and len(self.active) + len(joining) < self.config.batch_slots:
            row = self.waiting.popleft()
            joining.append((row, self._prefill(row, cache, slot=len(self.active) + len(joining))))
        logits = [self._decode(cache)] if self.active else []
        logits += [first for _, first in joining]
        self.active += [row for row, _ in joining]
        if logits:
            self._choose(torch.cat(logits), cache)

    def _prefill(self, row, cache, slot) -> torch.Tensor:
        """Copy the prompt's cache into a slot; the prompt itself is forwarded once for all that share it in a run."""
        prompt_ids = row.request.prompt_ids
        if self.prefix is None or self.prefix[0] != prompt_ids:
            prompt_cache = DynamicCache(config=self.model.config)
            ids = torch.tensor([prompt_ids], device=self.model.device)
            logits = self.model(input_ids=ids, cache=prompt_cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            self.prefix = (prompt_ids, prompt_cache, logits)
        for layer, source in zip(cache.layers, self.prefix[1].layers, strict=True):
            layer.write(slot, source.keys, source.values)
        return self.prefix[2]

    def _decode(self, cache) -> torch.Tensor:
        """One more token for the active rows -> logits (R, V) at it."""
        device = self.model.device
        lengths = torch.tensor([len(row.request.prompt_ids) + len(row.completion.ids) - 1 for row in self.active],
                               device=device)
        cache.place(lengths)
        ids = torch.tensor([[row.completion.ids[-1]] for row in self.active], device=device)
        columns = torch.arange(cache.longest, device=device)
        beyond = (columns[None] > lengths[:, None])[:, None, None]  # (R, 1, 1, L)
        mask = torch.zeros(beyond.shape, dtype=self.model.dtype, device=device)
        mask.masked_fill_(beyond, torch.finfo(self.model.dtype).min)
        return self.model(input_ids=ids, position_ids=lengths[:, None], attention_mask=mask, cache=cache,
                          use_cache=True).logits[:, -1]

    def _choose(self, logits, cache):
        """Draw one token for every active row and let go of the rows that end with it."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.config.temperature
        logprobs = logits.log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        kept = warp(logits, self.config.top_k, self.config.top_p)
        cumulative = kept.cumsum(-1, dtype=torch.float64)  # float32 drifts by 1e-5 over 150,000 entries
        draws = torch.tensor([row.uniforms[len(row.completion.ids)] for row in self.active], device=logits.device)
        # right=True: the first entry that exceeds the draw, which never has probability 0
        tokens = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)
        chosen = logprobs.gather(-1, tokens)[:, 0]
        off = self.config.top_k < 0 and self.config.top_p >= 1  # then the sum differs from 1 by rounding alone
        cut = torch.zeros_like(entropies) if off else (1 - cumulative[:, -1]).clamp(min=0)
        columns = (tokens[:, 0], chosen, entropies, cut)
        for row, values in zip(self.active, zip(*(column.tolist() for column in columns))):
            completion = row.completion
            for series, value in zip((completion.ids, completion.logprobs, completion.entropies,
                                      completion.truncated_mass), values):
                series.append(value)
            if completion.ids[-1] in self.eos_ids:
                completion.stopped_by = "eos"
            elif len(completion.ids) == row.limit:
                completion.stopped_by = "max_new_tokens" if row.limit == self.config.max_new_tokens else "max_model_len"
        self._release(cache)

    def _release(self, cache):
        """Finished rows give up their slots; the last rows move into the gaps, so that slots 0..R-1 stay occupied."""
        for slot in reversed(range(len(self.active))):
            row = self.active[slot]
            if row.completion.stopped_by:
                last = self.active.pop()
                if last is not row:
                    self.active[slot] = last
                    length = len(last.request.prompt_ids) + len(last.completion.ids) - 1
                    for layer in cache.layers:
                        layer.move(len(self.active), slot, length)
                if not row.future.cancelled():
                    row.future.set_result(row.completion)
