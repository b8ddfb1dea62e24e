"""The sampler: prompt ids in, sampled tokens and their logprobs out, on any transformers decoder.

Continuous batching over a fixed number of slots: a sample leaves its slot when it ends, a waiting one takes the place,
and every decode step is one batched forward over the occupied slots. A row joins with all of its prompt cached but the
last token, which its first decode step feeds. Keys and values that a slot holds already, of a sibling or of the turn
before, are used again: the longest common prefix is copied, only the rest is forwarded. What is drawn at one position
depends on one uniform number, a function of (key, position) alone, so the tokens do not depend on the slots, the order
or the number of processes.

    sampler = Sampler(model, eos_ids={2}, config=config.rollout)
    completions = sampler.run([Request(prompt_ids, key=(seed, step, group, sample)), ...])

Inside a coroutine, `await sampler.sample(request)` does the same while `sampler.drive()` runs (agent.py).

Shapes: S slots, R occupied ones, T tokens a row, L cached columns, V vocabulary, N max_new_tokens.
Leaves out: paged memory, speculation, penalties, captured graphs; temperature, top-k and top-p are the whole policy.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

GROW = 128      # columns added when the longest row outgrows the cache
PREFILL = 2048  # prompt tokens in one forward: more gains no speed and costs memory


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


def warp(probs, top_k, top_p) -> torch.Tensor:
    """Probabilities (R, V) after top-k, then top-p, not renormalised: what is cut is 0. Off at -1 and 1.0."""
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


def draw(logits, uniform, config) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (R, V), uniform (R,) in [0, 1) -> tokens (R,) and (R, 3): logprob, entropy, truncated mass of each."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / config.temperature
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    entropies = -(probs * logprobs).sum(-1)
    cumulative = warp(probs, config.top_k, config.top_p).cumsum(-1, dtype=torch.float64)  # float32 drifts by 1e-5
    total = cumulative[:, -1:]
    # right=True: the first entry that exceeds the draw, which never has probability 0
    tokens = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    off = config.top_k < 0 and config.top_p >= 1  # then the sum differs from 1 by rounding alone
    cut = torch.zeros_like(total) if off else (1 - total).clamp(min=0)
    return tokens[:, 0], torch.cat([logprobs.gather(-1, tokens), entropies[:, None], cut], 1)


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer, (S, heads, L, head_dim), for the rows and columns that the cache names."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def update(self, key_states, value_states, *_args, **_kwargs):
        slots, at, longest = self.cache.slots, self.cache.at, self.cache.longest
        self.keys, self.values = self.grown(self.keys, key_states), self.grown(self.values, value_states)
        self.is_initialized = True
        index = slots if isinstance(slots, torch.Tensor) else torch.arange(slots.stop, device=at.device)
        self.keys[index[:, None], :, at] = key_states.transpose(1, 2)
        self.values[index[:, None], :, at] = value_states.transpose(1, 2)
        return self.keys[slots, :, :longest], self.values[slots, :, :longest]

    def grown(self, held, states):
        columns = 0 if held is None else held.shape[2]
        if columns >= self.cache.longest:
            return held
        wanted = min(-(-self.cache.longest // GROW) * GROW, self.cache.most_columns)
        larger = states.new_zeros((self.cache.n_slots, states.shape[1], wanted, states.shape[3]))
        if columns:
            larger[:, :, :columns] = held
        return larger

    def copy(self, sources, targets, columns):
        """The first columns of slots `sources` (k,) or (1,) to slots `targets` (k,)."""
        self.keys[targets, :, :columns] = self.keys[sources, :, :columns]
        self.values[targets, :, :columns] = self.values[sources, :, :columns]


class _SlotCache(Cache):
    """The layers, and for the coming forward: its slots, the column of each of its tokens, the columns it may see."""

    def __init__(self, n_layers, n_slots, most_columns):
        self.n_slots, self.most_columns = n_slots, most_columns
        super().__init__(layers=[_SlotLayer(self) for _ in range(n_layers)])

    def place(self, slots, at):
        """slots: a slice from 0, or (R,) indices; at (R, T): where the tokens go."""
        self.slots, self.at, self.longest = slots, at, int(at.max()) + 1

    def copy(self, sources, targets, columns):
        for layer in self.layers:
            layer.copy(sources, targets, columns)


@dataclass(eq=False)
class _Row:
    request: Request
    limit: int  # tokens that may be sampled
    future: asyncio.Future


class _Slots:
    """What the slots hold: rows on the host, their tokens and numbers on the device; slots 0..R-1 decode."""

    def __init__(self, config, n_layers, device):
        n, new = config.batch_slots, config.max_new_tokens
        self.device = device
        self.rows, self.taken = [None] * n, np.zeros(n, bool)
        self.cache = _SlotCache(n_layers, n, config.max_model_len)
        self.held = np.zeros((n, config.max_model_len), np.int64)  # tokens whose keys are in a slot's columns ...
        self.n_held = np.zeros(n, np.int64)                        # ... so many, also after its row has ended
        self.last, self.length, self.count, self.limit = (torch.zeros(n, dtype=torch.long, device=device)
                                                          for _ in range(4))  # last token; cached, sampled, allowed
        self.ids = torch.zeros(n, new, dtype=torch.long, device=device)
        self.draws = torch.zeros(n, new, dtype=torch.float64, device=device)
        self.scores = torch.zeros(n, new, 3, dtype=torch.float64, device=device)

    def common(self, prompt) -> np.ndarray:
        """(S,): tokens that the prompt, without its last, has in common with the start of what each slot holds."""
        n = len(prompt) - 1
        same = np.zeros((len(self.rows), n + 1), bool)
        same[:, :n] = (self.held[:, :n] == prompt[:-1]) & (np.arange(n) < self.n_held[:, None])
        return same.argmin(1)

    def join(self, slot, row):
        prompt, n = row.request.prompt_ids, len(row.request.prompt_ids) - 1
        self.rows[slot], self.taken[slot] = row, True
        self.held[slot, :n], self.n_held[slot] = prompt[:-1], n
        self.last[slot], self.length[slot], self.count[slot], self.limit[slot] = prompt[-1], n, 0, row.limit
        self.draws[slot, :row.limit] = torch.from_numpy(uniforms(row.request.key, row.limit))

    def leave(self, slot, eos_ids, config):
        """Read a row out, resolve its future and free the slot; its keys stay until another row overwrites them."""
        row, n = self.rows[slot], int(self.count[slot])
        ids = self.ids[slot, :n].tolist()
        ended = "max_new_tokens" if row.limit == config.max_new_tokens else "max_model_len"
        columns = self.scores[slot, :n].T.tolist()
        self.rows[slot], self.taken[slot] = None, False
        self.held[slot, self.n_held[slot]:self.n_held[slot] + n] = [row.request.prompt_ids[-1], *ids[:-1]]
        self.n_held[slot] += n
        if not row.future.cancelled():
            row.future.set_result(Completion(ids, *columns, stopped_by="eos" if ids[-1] in eos_ids else ended))

    def close_gaps(self):
        """Move the last rows into the free slots before them."""
        n = self.taken.sum()
        targets, sources = np.flatnonzero(~self.taken[:n]), n + np.flatnonzero(self.taken[n:])
        if not len(targets):
            return
        for target, source in zip(targets, sources, strict=True):
            self.rows[target], self.rows[source] = self.rows[source], None
        self.cache.copy(sources, targets, int(self.length[sources].max()))
        for state in (self.taken, self.held, self.n_held, self.last, self.length, self.count, self.limit, self.ids,
                      self.draws, self.scores):
            state[targets] = state[sources]
        self.taken[sources] = False


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
        self.waiting = deque()

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
        row = _Row(request, limit, asyncio.get_running_loop().create_future())
        self.waiting.append(row)
        return await row.future

    async def drive(self):
        """Decode until nothing waits and nothing is active, giving way to other coroutines at every step."""
        await asyncio.sleep(0)
        self.model.eval()
        # made anew: the weights change between runs, so that no cached key may outlive one
        slots = _Slots(self.config, self.model.config.num_hidden_layers, self.model.device)
        try:
            while self.waiting or slots.taken.any():
                if self.stop():
                    raise InterruptedError("sampling was interrupted")
                for _ in self._admit(slots):
                    await asyncio.sleep(0)
                self._decode(slots)
                await asyncio.sleep(0)
        finally:
            self.waiting.clear()

    @torch.inference_mode()
    def _admit(self, slots):
        """Give waiting rows the free slots, with their prompts cached; yields after every forward."""
        copies, after, unfinished = {}, {}, {}  # (source, columns): targets, before and after the forwards; slot: start
        pending = np.zeros_like(slots.taken)
        while self.waiting and not slots.taken.all():
            row = self.waiting.popleft()
            last = len(row.request.prompt_ids) - 1
            common = slots.common(row.request.prompt_ids)
            common[pending & (common < last)] = 0  # not forwarded yet: of use to siblings, which need no forward
            source = int((2 * common + ~slots.taken).argmax())
            start = int(common[source])
            slot = int(slots.taken.argmin()) if slots.taken[source] else source
            if source != slot and start:
                (after if pending[source] else copies).setdefault((source, start), []).append(slot)
            if start < last:
                unfinished[slot] = start
            pending[slot] = start < last or pending[source]
            slots.join(slot, row)
        for pairs in (copies, after):
            for (source, start), targets in pairs.items():
                slots.cache.copy([source], targets, start)
            if pairs is copies:
                yield from self._prefill(slots, unfinished)
        slots.close_gaps()

    def _prefill(self, slots, unfinished):
        """Forward the prompts of slots from their starts: short ones side by side, a long one alone, in chunks."""
        device, unfinished = self.model.device, list(unfinished.items())
        while unfinished:
            k = 1
            while k < len(unfinished) and (k + 1) * slots.n_held[[s for s, _ in unfinished[:k + 1]]].max() <= PREFILL:
                k += 1
            batch, unfinished = unfinished[:k], unfinished[k:]
            index = torch.tensor([slot for slot, _ in batch], device=device)
            longest = max(slots.n_held[slot] - start for slot, start in batch)
            for offset in range(0, longest, PREFILL // k):
                width = min(PREFILL // k, longest - offset)
                # what lies beyond a prompt goes to the column that its first decode step will overwrite
                at = np.array([np.minimum(np.arange(start, start + width) + offset, slots.n_held[slot])
                               for slot, start in batch])
                ids = slots.held[[slot for slot, _ in batch]][np.arange(k)[:, None], at]
                self._forward(slots.cache, index, torch.from_numpy(ids).to(device), torch.from_numpy(at).to(device))
                yield

    def _forward(self, cache, slots, ids, at) -> torch.Tensor:
        """ids, at (R, T): tokens and their columns, which are their positions -> logits (R, V) at the last."""
        cache.place(slots, at)
        beyond = (torch.arange(cache.longest, device=at.device) > at[:, :, None])[:, None]  # (R, 1, T, L)
        mask = torch.zeros(beyond.shape, dtype=self.model.dtype, device=at.device)
        mask.masked_fill_(beyond, torch.finfo(self.model.dtype).min)
        return self.model(input_ids=ids, position_ids=at, attention_mask=mask, cache=cache, use_cache=True,
                          logits_to_keep=1).logits[:, -1]

    @torch.inference_mode()
    def _decode(self, slots):
        """One more token for every row; those that end with it leave."""
        n = int(slots.taken.sum())
        rows = torch.arange(n, device=self.model.device)
        logits = self._forward(slots.cache, slice(0, n), slots.last[:n, None], slots.length[:n, None])
        position = rows, slots.count[:n]
        tokens, scores = draw(logits, slots.draws[position], self.config)
        slots.ids[position], slots.scores[position] = tokens, scores.double()
        slots.last[:n] = tokens
        slots.length[:n] += 1
        slots.count[:n] += 1
        ended = slots.count[:n] == slots.limit[:n]
        for eos in self.eos_ids:
            ended |= tokens == eos
        for slot in np.flatnonzero(ended.cpu()):
            slots.leave(slot, self.eos_ids, self.config)
