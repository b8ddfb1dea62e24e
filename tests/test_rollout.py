"""rollout.py: tokens against an own loop of full forwards and model.generate, limits, slots, truncation by hand."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from config import load_config
from rollout import Request, Sampler, draw, uniforms, warp

BASE = str(Path(__file__).resolve().parent.parent / "rl_config.json")
VOCABULARY, EOS = 19, (2, 5)
FIVE = [0.4, 0.3, 0.15, 0.1, 0.05]  # a distribution for truncation by hand


def settings(**keys):
    keys = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "max_model_len": 40,
            "batch_slots": 3} | keys
    return load_config(BASE, [f"rollout.{name}={value}" for name, value in keys.items()]).rollout


def language_model(kind="qwen3", dtype=torch.float64, **more):
    torch.manual_seed(1)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=48,
                            initializer_range=0.3, **more)
        return GPT2LMHeadModel(config).to(dtype).eval()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3} | more
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()
    return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes)).to(dtype).eval()


def fixed_distribution(probabilities):
    """A model whose next token has these probabilities, whatever came before."""
    model = language_model(vocab_size=len(probabilities), tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(32, len(probabilities), dtype=torch.float64)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias.data = torch.tensor(probabilities, dtype=torch.float64).log().clamp(min=-1e4)  # exp(-1e4) is 0
    return model


def requests(prompts=((3, 4, 6, 7), (8,), (9, 10, 11, 12, 13, 14, 15)), samples=4):
    return [Request(list(prompt), key=(7, 0, 1, group, sample))
            for group, prompt in enumerate(prompts) for sample in range(samples)]


def own_loop(model, request, config):
    """The same policy with a full forward a token and numpy for the draw."""
    ids, numbers = list(request.prompt_ids), uniforms(request.key, config.max_new_tokens)
    for number in numbers:
        with torch.no_grad():
            probs = (model(input_ids=torch.tensor([ids])).logits[0, -1].double() / config.temperature).softmax(-1)
        ids.append(int(np.flatnonzero(probs.numpy().cumsum() > number)[0]))
        if ids[-1] in EOS:
            break
    return ids[len(request.prompt_ids):]


def assert_scores(model, request, completion, temperature, tolerance):
    """Logprobs and entropies against one plain forward over prompt and response."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([request.prompt_ids + completion.ids])).logits[0]
    distribution = (logits[len(request.prompt_ids) - 1:-1] / temperature).log_softmax(-1)
    expected = distribution.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=tolerance)
    entropies = -(distribution.exp() * distribution).sum(-1)
    np.testing.assert_allclose(completion.entropies, entropies, rtol=0, atol=tolerance)


def shapes_forwarded(model):
    """A list that grows by the (rows, tokens) of every forward."""
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return shapes


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_tokens_equal_an_own_loop_of_full_forwards(kind):
    model, config = language_model(kind), settings()
    asked = requests()
    completions = Sampler(model, EOS, config).run(asked)
    for request, completion in zip(asked, completions, strict=True):
        assert completion.ids == own_loop(model, request, config)
        assert_scores(model, request, completion, 0.8, 1e-12)
    assert len({tuple(completion.ids) for completion in completions}) > 8  # 12 samples, hardly one twice


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_logprobs_in_float32(kind):
    model = language_model(kind, torch.float32)
    asked = requests()
    for request, completion in zip(asked, Sampler(model, EOS, settings()).run(asked), strict=True):
        assert_scores(model, request, completion, 0.8, 1e-5)


def test_logprobs_in_bfloat16():
    model = language_model(dtype=torch.bfloat16)
    asked = requests()
    completions = Sampler(model, EOS, settings()).run(asked)
    model.double()  # the same weights, exact arithmetic
    for request, completion in zip(asked, completions, strict=True):
        assert_scores(model, request, completion, 0.8, 0.3)


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_tokens_do_not_depend_on_slots_or_order(slots):
    model, asked = language_model(), requests()
    expected = Sampler(model, EOS, settings(batch_slots=3)).run(asked)
    order = np.random.default_rng(slots).permutation(len(asked))
    for permutation in (range(len(asked)), order):
        found = Sampler(model, EOS, settings(batch_slots=slots)).run([asked[i] for i in permutation])
        assert [completion.ids for completion in found] == [expected[i].ids for i in permutation]
    assert Sampler(model, EOS, settings()).run([asked[5]])[0].ids == expected[5].ids


def test_long_rows_outgrow_the_cache():
    # 128 columns are added at a time; rows of 3 and 140 prompt tokens are decoded past 128 and 256
    model, config = language_model(max_position_embeddings=512), settings(max_new_tokens=130, max_model_len=400)
    asked = requests([(3, 4, 6), [6, 7, 8, 9, 10, 11, 12] * 20], samples=2)
    completions = Sampler(model, (), config).run(asked)
    for request, completion in zip(asked, completions, strict=True):
        assert len(completion.ids) == 130
        assert_scores(model, request, completion, 0.8, 1e-11)


def test_a_tiny_temperature_is_greedy():
    model, asked = language_model(), requests(samples=1)
    for request, completion in zip(asked, Sampler(model, EOS, settings(temperature=1e-6)).run(asked), strict=True):
        greedy = model.generate(torch.tensor([request.prompt_ids]), do_sample=False, max_new_tokens=12,
                                eos_token_id=list(EOS), pad_token_id=0)
        assert completion.ids == greedy[0, len(request.prompt_ids):].tolist()


def test_every_eos_ends_a_row_and_is_its_last_id():
    completions = Sampler(language_model(), EOS, settings(max_new_tokens=30)).run(requests(samples=24))
    ended = [completion for completion in completions if completion.stopped_by == "eos"]
    assert {completion.ids[-1] for completion in ended} == set(EOS)
    for completion in completions:
        assert not set(completion.ids[:-1]) & set(EOS) and 1 <= len(completion.ids) <= 30
        assert completion.truncated == (completion.ids[-1] not in EOS)
        lengths = {len(completion.logprobs), len(completion.entropies), len(completion.truncated_mass)}
        assert lengths == {len(completion.ids)}


def test_length_limits():
    asked = requests()  # prompts of 4, 1 and 7 tokens
    completions = Sampler(language_model(), (), settings(max_new_tokens=9, max_model_len=12)).run(asked)
    found = {len(request.prompt_ids): (len(completion.ids), completion.stopped_by)
             for request, completion in zip(asked, completions, strict=True)}
    assert found == {4: (8, "max_model_len"), 1: (9, "max_new_tokens"), 7: (5, "max_model_len")}
    exact = Sampler(language_model(), (), settings(max_new_tokens=8, max_model_len=12)).run(asked[:1])[0]
    assert (len(exact.ids), exact.stopped_by, exact.truncated) == (8, "max_new_tokens", True)


@pytest.mark.parametrize("prompt", [[3] * 40, [3] * 41, []])
def test_a_prompt_without_room_raises_and_the_sampler_goes_on(prompt):
    sampler = Sampler(language_model(), EOS, settings())
    expected = sampler.run(requests())
    with pytest.raises(ValueError, match=f"a prompt of {len(prompt)} tokens leaves no room in max_model_len 40"):
        sampler.run([*requests(), Request(prompt, (1,))])
    assert sampler.run(requests()) == expected
    assert len(sampler.run([Request([3] * 39, (1,))])[0].ids) == 1


def test_no_requests():
    assert Sampler(language_model(), EOS, settings()).run([]) == []


def test_stop_interrupts_and_the_sampler_can_be_used_again():
    asked, steps = [], 0

    def stop():
        asked.append(None)
        return len(asked) == steps

    sampler = Sampler(language_model(), EOS, settings(), stop)
    expected, decode_steps = sampler.run(requests()), len(asked)
    for steps in (1, 5):
        asked.clear()
        with pytest.raises(InterruptedError):
            sampler.run(requests())
        assert len(asked) == steps
    steps = 0
    asked.clear()
    assert sampler.run(requests()) == expected and len(asked) == decode_steps  # nothing is left of the runs before


def test_a_prompt_is_forwarded_once_for_its_group():
    model = language_model()
    forwarded = shapes_forwarded(model)
    sampler = Sampler(model, (), settings(batch_slots=3, max_new_tokens=4))
    sampler.run(requests([(3, 4, 6, 7), (8, 9), (9, 10, 11)], samples=4))
    # 12 rows of 4 tokens through 3 slots: 4 waves; the last token of a prompt is fed by each row's first decode step
    wave = [(3, 1)] * 4
    assert forwarded == [(1, 3), *wave, (1, 1), *wave, (1, 2), *wave, *wave]
    forwarded.clear()
    sampler.run(requests([(9, 10, 11)], samples=1))
    assert forwarded[0] == (1, 2)  # not kept from the run before: the weights may have changed


def test_prompts_are_prefilled_side_by_side_and_long_ones_in_chunks():
    model = language_model(max_position_embeddings=6000)
    shapes, sizes = shapes_forwarded(model), (700, 600, 1, 300, 5000, 40)
    asked = requests([np.random.default_rng(size).integers(6, VOCABULARY, size).tolist() for size in sizes], samples=2)
    completions = Sampler(model, (), settings(max_model_len=5010, max_new_tokens=3, batch_slots=20)).run(asked)
    # all prompts but their last tokens, at most 2,048 with the padding; siblings and the prompt of one token need none
    assert shapes == [(2, 699), (1, 299), (1, 2048), (1, 2048), (1, 903), (1, 39)] + [(12, 1)] * 3
    for request, completion in zip(asked, completions, strict=True):
        assert_scores(model, request, completion, 0.8, 1e-10)


def test_a_prompt_is_forwarded_from_where_it_leaves_what_a_slot_holds():
    model, config = language_model(), settings(batch_slots=2, max_new_tokens=6)
    shapes, sampler = shapes_forwarded(model), Sampler(model, (), config)

    async def turns(sample):
        first = Request([3, 4, 6, 7], (sample, 0))
        second = Request([*first.prompt_ids, *(await sampler.sample(first)).ids, 8, 9, 10 + sample], (sample, 1))
        return second, await sampler.sample(second)

    async def together():
        return await asyncio.gather(sampler.drive(), turns(0), turns(1))

    found = asyncio.run(together())[1:]
    # the last token that was sampled is not cached; with 8 and 9 there are three before the last of the prompt
    assert shapes == [(1, 3)] + [(2, 1)] * 6 + [(2, 3)] + [(2, 1)] * 6
    for second, completion in found:
        assert_scores(model, second, completion, 0.8, 1e-12)
    shapes.clear()
    asked = [Request(prompt, (i,)) for i, prompt in enumerate([[3, 4, 6, 7], [3, 4, 6, 8, 9, 9], [3, 4, 8, 8]])]
    completions = sampler.run(asked)
    # two join at once, so neither can use the other; the third has two tokens in common with both
    assert shapes == [(2, 5)] + [(2, 1)] * 6 + [(1, 1)] + [(1, 1)] * 6
    for request, completion in zip(asked, completions, strict=True):
        assert_scores(model, request, completion, 0.8, 1e-12)


def test_finished_rows_are_decoded_no_further():
    model, forwarded = language_model(), 0

    def count(_module, _args, kwargs):
        nonlocal forwarded
        forwarded += kwargs["input_ids"].numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    completions = Sampler(model, EOS, settings(batch_slots=5)).run(requests([(3, 4, 6, 7)], samples=20))
    assert len({len(completion.ids) for completion in completions}) > 3
    # three prompt tokens once; then one position for every sampled token: the one before it
    assert forwarded == 3 + sum(len(completion.ids) for completion in completions)


def test_a_coroutine_may_ask_again_while_the_sampler_drives():
    model, config = language_model(), settings()
    sampler = Sampler(model, EOS, config)

    async def two_turns(sample):
        first = await sampler.sample(Request([3, 4], (sample, 0)))
        return await sampler.sample(Request([3, 4, *first.ids, 6], (sample, 1)))

    async def together():
        return await asyncio.gather(sampler.drive(), *(two_turns(sample) for sample in range(5)))

    for sample, completion in enumerate(asyncio.run(together())[1:]):
        first = own_loop(model, Request([3, 4], (sample, 0)), config)
        assert completion.ids == own_loop(model, Request([3, 4, *first, 6], (sample, 1)), config)


def test_a_model_with_sliding_window_attention_is_refused():
    model = language_model(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="has sliding-window attention"):
        Sampler(model, EOS, settings())


@pytest.mark.parametrize("top_k, top_p, kept", [
    (-1, 1.0, [0, 1, 2, 3, 4]),
    (2, 1.0, [0, 1]),
    (9, 1.0, [0, 1, 2, 3, 4]),
    (-1, 0.3, [0]),  # at least one stays
    (-1, 0.6, [0, 1]),  # 0.4 < 0.6: the token that crosses stays
    (-1, 0.8, [0, 1, 2]),  # 0.7 < 0.8 <= 0.85
    (3, 0.8, [0, 1]),  # of the three, renormalised: 0.7 / 0.85 = 0.82 >= 0.8 before the third
    (3, 0.9, [0, 1, 2]),
])
def test_top_k_and_top_p_by_hand(top_k, top_p, kept):
    expected = np.array([p if i in kept else 0 for i, p in enumerate(FIVE)])
    order = np.array([3, 0, 4, 2, 1])  # the cut is by rank, wherever the tokens stand
    probs = torch.tensor(np.array([FIVE, np.array(FIVE)[order]]))
    np.testing.assert_allclose(warp(probs, top_k, top_p), [expected, expected[order]], rtol=1e-12)
    completions = Sampler(fixed_distribution(FIVE), (), settings(top_k=top_k, top_p=top_p, temperature=1)).run(
        requests([(1, 2), (3,)], samples=6))
    cut_off = [completion.truncated_mass for completion in completions]
    np.testing.assert_allclose(cut_off, 1 - expected.sum(), atol=1e-12)
    assert {i for completion in completions for i in completion.ids} == set(kept)
    for completion in completions:  # of the whole distribution, not of what is left
        np.testing.assert_allclose(completion.logprobs, np.log(FIVE)[completion.ids])


def test_equal_probabilities_are_cut_by_index():
    assert (warp(torch.full((1, 4), 0.25), 2, 1.0) > 0).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (0.2499, 1), (0.2501, 3), (np.nextafter(1, 0), 3)])
def test_the_draw_picks_from_the_cumulative_distribution(uniform, token):
    # probabilities of exactly 0 at both ends and in the middle
    logits = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).log().clamp(min=-1e4)
    tokens, scores = draw(logits, torch.tensor([uniform], dtype=torch.float64), settings(temperature=1))
    assert tokens.tolist() == [token]
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(scores, [[np.log([0.25, 0.75])[token // 2], entropy, 0]], rtol=1e-12)


def test_draws_follow_the_softmax():
    probabilities, n = [0.5, 0.2, 0.0, 0.15, 0.1, 0.04, 0.01], 4000
    completions = Sampler(fixed_distribution(probabilities), (), settings(
        max_new_tokens=1, batch_slots=500, temperature=1)).run([Request([3], (0, 0, 1, 2, i)) for i in range(n)])
    counts = np.bincount([completion.ids[0] for completion in completions], minlength=7)
    assert counts[2] == 0
    p = np.array(probabilities)
    assert (np.abs(counts - n * p) <= 4 * np.sqrt(n * p * (1 - p))).all()


def test_temperature_shapes_the_distribution():
    # squares at temperature 1/2: 0.49, 0.04, 0.01 over their sum 0.54
    model = fixed_distribution([0.7, 0.2, 0.1])
    completion = Sampler(model, (), settings(temperature=0.5)).run([Request([1], (3,))])[0]
    np.testing.assert_allclose(completion.logprobs, np.log(np.array([0.49, 0.04, 0.01]) / 0.54)[completion.ids])


def test_uniforms_are_a_function_of_the_key_and_the_position():
    key = (42, 0, 3, 5, 7)
    assert uniforms(key, 50).tolist() == np.random.default_rng(key).random(50).tolist()
    assert uniforms(key, 50)[:9].tolist() == uniforms(key, 9).tolist()
    others = [(43, 0, 3, 5, 7), (42, 1, 3, 5, 7), (42, 0, 4, 5, 7), (42, 0, 3, 6, 7), (42, 0, 3, 5, 8),
              (42, 0, 3, 7, 5)]
    assert len({uniforms(other, 1)[0] for other in [key, *others]}) == 7
    assert ((uniforms(key, 1000) >= 0) & (uniforms(key, 1000) < 1)).all()
