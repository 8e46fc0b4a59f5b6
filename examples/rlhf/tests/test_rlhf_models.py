"""Models, adapters, rollouts and command lines of the RLHF examples, in one process without DeepSpeed's engine."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import models, rollout
from common.arguments import (
    PPOArguments,
    SFTArguments,
    check_length,
    check_rollout,
    parse,
    read_ds_config,
)
from common.arguments import settings as settings_of
from common.batch import Batch, Tokens
from common.models import (
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD,
    Adapters,
    Start,
    TokenScores,
    find_start,
    gathered_weights,
    load_policy,
    load_scorer,
    load_tokenizer,
    lora_config,
    save_model,
    without_dropout,
)
from common.roles import Role, scores_of, values_of
from common.rollout import Sampling, as_rollout, end_tokens, roll_out, seed_of, seeded
from common.tokenizer import make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForSequenceClassification, T5Config

TARGETS = ["q_proj", "v_proj", "down_proj"]
TOKENIZER = make_byte_tokenizer()
VOCABULARY = len(TOKENIZER)
PLAIN = {"zero_optimization": {"stage": 0}}  # of a ds_config: nothing is partitioned


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """torch.distributed as one rank sees it."""
    alone = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1, barrier=lambda: None)
    monkeypatch.setattr(models, "dist", alone)
    monkeypatch.setattr(rollout, "dist", alone)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model, a LoRA adapter of it, a scoring model, and a scoring model's adapter."""
    root = tmp_path_factory.mktemp("start")
    base = llama(vocab=VOCABULARY)
    base.save_pretrained(root / "base")
    TOKENIZER.save_pretrained(root / "base")
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=6, lora_dropout=0.1, target_modules=TARGETS, init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "base"), config)
    adapted.save_pretrained(root / "adapter")
    TOKENIZER.save_pretrained(root / "adapter")
    torch.manual_seed(2)
    scorer = LlamaForSequenceClassification.from_pretrained(root / "base", num_labels=1)
    scorer.save_pretrained(root / "scorer")
    scorer = LlamaForSequenceClassification.from_pretrained(root / "scorer")
    config = copy.deepcopy(config)
    config.task_type = "SEQ_CLS"
    torch.manual_seed(3)
    get_peft_model(scorer, config).save_pretrained(root / "scorer adapter")
    return root


@pytest.fixture(scope="module")
def adapter(folders):
    return Start(str(folders / "base"), str(folders / "adapter"))


def tokens(rows=3, length=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, length), generator=generator)


def lora_of(start):
    return LoraConfig.from_pretrained(start.adapter)


def trained(model):
    return {name for name, param in model.named_parameters() if param.requires_grad}


# --- adapters ----------------------------------------------------------------------------------------------------


def test_policy_and_reference_are_the_same_adapter_and_only_one_is_trained(folders, adapter):
    model = load_policy(adapter, PLAIN, lora_of(adapter), reference=True)
    ids = tokens()
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "base"), folders / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folders / "base")
    assert trained(model) and all(f".{POLICY}." in name for name in trained(model))
    assert len(trained(model)) == 2 * len(TARGETS) * 2  # A and B, in two layers
    model.eval()
    with torch.no_grad():
        for name, oracle in ((POLICY, expected), (REFERENCE, expected), (None, base)):
            with Adapters(model).using(name):
                assert torch.equal(model(ids).logits, oracle.eval()(ids).logits)
    assert not torch.equal(expected(ids).logits, base(ids).logits)


def test_switching_changes_nothing_but_what_computes(adapter):
    model = load_policy(adapter, PLAIN, lora_of(adapter), reference=True).eval()
    torch.manual_seed(5)
    for name, param in model.named_parameters():
        if f".{POLICY}." in name:
            param.data.normal_()
    before, ids = trained(model), tokens()
    active = model(ids).logits
    with Adapters(model).using(REFERENCE):
        assert trained(model) == before
        reference = model(ids).logits
        with Adapters(model).using(None):
            assert trained(model) == before
            none = model(ids).logits
        assert torch.equal(model(ids).logits, reference)
    with pytest.raises(KeyError), Adapters(model).using(None):
        raise KeyError
    assert torch.equal(model(ids).logits, active) and trained(model) == before
    for name, logits in ((POLICY, active), (REFERENCE, reference)):  # as PEFT itself switches
        model.set_adapter(name)
        assert torch.equal(model(ids).logits, logits)
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, none)
    assert not torch.equal(active, reference) and not torch.equal(reference, none)


def test_unknown_adapters_are_refused_and_plain_models_left_alone(adapter):
    model = load_policy(adapter, PLAIN, lora_of(adapter), reference=True)
    with (
        pytest.raises(ValueError, match="no adapter 'critic'; it has policy, reference"),
        Adapters(model).using(CRITIC),
    ):
        pass
    plain = llama()
    with Adapters(plain).using(POLICY):
        pass


def test_gradients_reach_the_trained_adapter_alone(adapter):
    model = load_policy(adapter, PLAIN, lora_of(adapter), reference=True)
    ids = tokens()
    with Adapters(model).using(REFERENCE):
        assert not model(ids).logits.requires_grad
    model(ids).logits.square().mean().backward()
    assert {name for name, param in model.named_parameters() if param.grad is not None} == trained(model)


def test_without_an_adapter_to_start_from_a_new_one_changes_nothing(folders):
    lora = LoraConfig(r=2, target_modules="all-linear")
    model = load_policy(Start(str(folders / "base")), PLAIN, lora, reference=True).eval()
    assert list(model.peft_config) == [POLICY]
    ids, base = tokens(), AutoModelForCausalLM.from_pretrained(folders / "base")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, base(ids).logits)
    layers = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained(model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_an_adapter_of_another_model_is_refused(folders, adapter, tmp_path):
    lora = LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folders / "base"), lora).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the adapter in .* does not fit this LlamaForCausalLM: see .*lora"):
        load_policy(Start(adapter.base, str(tmp_path)), PLAIN, lora_of(adapter))


def test_an_adapter_is_merged_where_all_weights_are_trained(folders, adapter):
    model = load_policy(adapter, PLAIN, None)
    assert len(trained(model)) == len(list(model.parameters())) and not isinstance(model, PeftModel)
    oracle = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "base"), folders / "adapter")
    wanted = oracle.merge_and_unload().state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    assert not any("lora" in name for name, _ in model.named_modules())


def test_dropout_is_off(adapter):
    model = load_policy(adapter, PLAIN, lora_of(adapter))
    model.get_base_model().model.layers[0].self_attn.attention_dropout = 0.3
    model.train()
    ids = tokens()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    without_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


# --- scoring models ----------------------------------------------------------------------------------------------


def right_padded(lengths, seed=0):
    """Tokens of these lengths as a batch, all but the first token chosen."""
    length = max(lengths)
    ids, attention = tokens(len(lengths), length, seed), torch.zeros(len(lengths), length, dtype=torch.int64)
    for row, own in enumerate(lengths):
        attention[row, :own] = 1
        ids[row, own:] = TOKENIZER.pad_token_id
    return Tokens(ids, attention, attention[:, 1:].bool())


def test_scores_are_those_of_transformers(folders):
    """transformers pools the last token that is no padding."""
    scorer = load_scorer(Start(str(folders / "scorer")), PLAIN, None).eval()
    oracle = LlamaForSequenceClassification.from_pretrained(folders / "scorer").eval()
    oracle.config.pad_token_id = TOKENIZER.pad_token_id
    batch = right_padded([7, 11, 1, 4])
    scores = scores_of(Role(SimpleEngine(scorer)), batch)
    wanted = oracle(batch.input_ids, batch.attention_mask).logits[:, 0]
    assert scores.dtype == torch.float32 and torch.allclose(scores, wanted, atol=1e-6)
    every = scorer(batch.input_ids, batch.attention_mask)
    for length in (1, 4, 7):  # of a text up to any token
        part = right_padded([length], seed=0)
        part.input_ids[0] = batch.input_ids[0, :length]
        assert torch.allclose(scores_of(Role(SimpleEngine(scorer)), part), every[0, length - 1], atol=1e-6)
    assert torch.equal(values_of(Role(SimpleEngine(scorer)), batch), every[:, :-1])


class SimpleEngine:
    """The parts of an engine that a role needs."""

    def __init__(self, module):
        self.module, self.device = module, torch.device("cpu")

    def __call__(self, **inputs):
        return self.module(**inputs)

    def eval(self):
        self.module.eval()

    def train(self):
        self.module.train()


def test_critic_and_reward_share_one_backbone(folders):
    start = find_start(str(folders / "scorer adapter"))
    assert start.scores and start.base == str(folders / "scorer")
    model = load_scorer(start, PLAIN, lora_of(start), trained=CRITIC, frozen=REWARD).eval()
    names = [name for name, _ in model.named_parameters() if "q_proj.base_layer" in name]
    assert len(names) == 2  # layers
    heads = {name for name in trained(model) if "score" in name}
    assert heads == {f"model.base_model.model.score.modules_to_save.{CRITIC}.weight"}
    assert all(f".{CRITIC}." in name for name in trained(model))
    oracle = LlamaForSequenceClassification.from_pretrained(folders / "scorer")
    oracle = TokenScores(PeftModel.from_pretrained(oracle, folders / "scorer adapter")).eval()
    batch, engine = right_padded([7, 11, 4]), SimpleEngine(model)
    wanted = oracle(batch.input_ids, batch.attention_mask)
    for adapter in (CRITIC, REWARD):
        assert torch.equal(Role(engine, adapter)(batch.input_ids, batch.attention_mask), wanted)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in trained(model):
                param.add_(0.1)
    assert torch.equal(Role(engine, REWARD)(batch.input_ids, batch.attention_mask), wanted)
    assert not torch.allclose(Role(engine, CRITIC)(batch.input_ids, batch.attention_mask), wanted, atol=1e-3)


def test_a_scorer_over_a_language_models_adapter(folders, adapter):
    """The hidden states are those of the policy, the head is new: zero if asked for."""
    batch = right_padded([7, 11, 4])
    ids, attention = batch.input_ids, batch.attention_mask
    policy = load_policy(adapter, PLAIN, lora_of(adapter)).eval()
    hidden = policy(ids, attention, output_hidden_states=True).hidden_states[-1]
    torch.manual_seed(7)
    scorer = load_scorer(adapter, PLAIN, lora_of(adapter), trained=CRITIC).eval()
    head = dict(scorer.named_parameters())[f"model.base_model.model.score.modules_to_save.{CRITIC}.weight"]
    assert head.requires_grad and 0.01 < head.std() < 0.03
    assert torch.allclose(scorer(ids, attention), hidden @ head[0], atol=1e-6)
    for lora in (lora_of(adapter), None):
        critic = load_scorer(adapter, PLAIN, lora, trained=CRITIC, new_head="zero").eval()
        assert torch.equal(critic(ids, attention), torch.zeros(3, 11))
        critic(ids, attention).sum().backward()  # but it learns
        assert any(param.grad is not None and param.grad.any() for param in critic.parameters())
    merged = load_scorer(adapter, PLAIN, None)
    weights = load_policy(adapter, PLAIN, None).model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in merged.model.model.state_dict().items())


def test_the_head_of_a_scoring_model_is_kept(folders):
    """Also where a critic would get a new one, and under new adapters."""
    batch = right_padded([7, 11, 4])
    oracle = TokenScores(LlamaForSequenceClassification.from_pretrained(folders / "scorer")).eval()
    wanted = oracle(batch.input_ids, batch.attention_mask)
    start, lora = Start(str(folders / "scorer")), LoraConfig(r=2, target_modules="all-linear")
    critic = load_scorer(start, PLAIN, lora, trained=CRITIC, new_head="zero").eval()
    assert torch.equal(critic(batch.input_ids, batch.attention_mask), wanted)
    with torch.no_grad():
        for name, param in critic.named_parameters():
            if name in trained(critic):
                param.add_(0.1)
    with Adapters(critic).using(None):
        assert torch.equal(critic(batch.input_ids, batch.attention_mask), wanted)
    start = find_start(str(folders / "scorer adapter"))
    merged = load_scorer(start, PLAIN, None, new_head="zero").eval()
    two = load_scorer(start, PLAIN, lora_of(start), trained=CRITIC).eval()
    wanted = two(batch.input_ids, batch.attention_mask)
    assert torch.allclose(merged(batch.input_ids, batch.attention_mask), wanted, atol=1e-5) and wanted.std() > 0.01


def test_a_model_without_a_head_called_score_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no head `score`; take another model"):
        TokenScores(llama())


# --- where a stage starts ----------------------------------------------------------------------------------------


def test_starts(folders, tmp_path):
    assert find_start("owner/name") == Start("owner/name")
    assert find_start(str(folders / "base")) == Start(str(folders / "base"))
    assert find_start(str(folders / "adapter")) == Start(str(folders / "base"), str(folders / "adapter"))
    assert not find_start(str(folders / "adapter")).scores and not Start("owner/name").scores
    with pytest.raises(FileNotFoundError, match=r"no model there \(neither config.json nor adapter_config.json\)"):
        find_start(str(tmp_path))
    config = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match=r'an adapter for .*gone, which is not there; set "base_model_name'):
        find_start(str(tmp_path))


def test_tokenizers_without_padding_or_end(tmp_path):
    tokenizer = make_byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='no end token, so no response could end; set "eos_token" in its tokenizer_'):
        load_tokenizer(str(tmp_path))


def test_lora_follows_the_ds_config_unless_told_otherwise(adapter):
    base = Start(adapter.base)
    stored = {**PLAIN, "zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "qlora"}}
    sent = {"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "zeropp"}}

    def config(ds_config, start=base, rank=None, alpha=None):
        return lora_config(SimpleNamespace(lora_rank=rank, lora_alpha=alpha, lora_dropout=0.1), ds_config, start)

    assert config(sent) is None and config(PLAIN) is None and config(PLAIN, adapter) is None
    default = config(stored)
    assert (default.r, default.lora_alpha, default.lora_dropout, default.target_modules) == (16, 32, 0.1, "all-linear")
    assert (config(sent, rank=8).r, config(sent, rank=8, alpha=3.0).lora_alpha) == (8, 3.0)
    assert config(stored, adapter).r == 4 and config(sent, adapter, rank=8).lora_alpha == 6
    with pytest.raises(ValueError, match=r"--lora_rank 0 trains all weights, but the ds_config stores .* as nf4 codes"):
        config(stored, rank=0)


# --- handing over and saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_handed_over_merged_and_the_model_stays(folders, adapter, tmp_path, tie):
    if tie:
        llama(vocab=VOCABULARY, tie=True).save_pretrained(tmp_path / "tied")
        adapter = Start(str(tmp_path / "tied"), adapter.adapter)
    model = load_policy(adapter, PLAIN, lora_of(adapter), reference=True).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handed = {name: weight.clone() for name, weight in gathered_weights(model, POLICY)}
    merged = load_policy(adapter, PLAIN, None)
    assert list(handed) == [name for name, _ in merged.named_parameters()]
    for name, param in merged.named_parameters():
        assert torch.equal(handed[name], param), name
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    base = AutoModelForCausalLM.from_pretrained(adapter.base)
    plain = dict(gathered_weights(model, None))
    assert all(torch.equal(plain[name], param) for name, param in base.named_parameters())
    next(iter(gathered_weights(model, POLICY)))  # one who stops early
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_what_is_saved_is_what_the_next_stage_starts_from(folders, adapter, tmp_path):
    model, ids = load_policy(adapter, PLAIN, lora_of(adapter), reference=True).eval(), tokens()
    for name, param in model.named_parameters():
        if f".{POLICY}." in name:
            param.data.mul_(1.5)
    save_model(model, tmp_path / "policy", TOKENIZER, POLICY)
    start = find_start(str(tmp_path / "policy"))
    assert start == Start(adapter.base, str(tmp_path / "policy")) and Path(start.base).is_absolute()
    again = load_policy(start, PLAIN, lora_of(start)).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapter.base), start.adapter).eval()
    assert torch.equal(peft(ids).logits, model(ids).logits)
    assert load_tokenizer(str(tmp_path / "policy")).get_vocab() == TOKENIZER.get_vocab()

    scorer_start = find_start(str(folders / "scorer adapter"))
    scorer = load_scorer(scorer_start, PLAIN, lora_of(scorer_start), trained=CRITIC, frozen=REWARD).eval()
    with torch.no_grad():
        for name, param in scorer.named_parameters():
            if name in trained(scorer):
                param.mul_(1.5)
    save_model(scorer, tmp_path / "critic", TOKENIZER, CRITIC)
    start, batch = find_start(str(tmp_path / "critic")), right_padded([7, 11])
    again = load_scorer(start, PLAIN, lora_of(start), trained=REWARD).eval()
    assert torch.equal(again(batch.input_ids, batch.attention_mask), scorer(batch.input_ids, batch.attention_mask))


# --- rollouts ----------------------------------------------------------------------------------------------------

END, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


@settings(derandomize=True, max_examples=150)
@given(st.data())
def test_responses_end_behind_their_end_token_and_masks_speak_of_the_next_token(data):
    """Against positions counted one by one; the padding token may be the end token."""
    pad = data.draw(st.sampled_from([PAD, END]))
    ends = data.draw(st.sampled_from([[END], [7, END]]))
    token = st.sampled_from([7, 8, 9, END, pad])
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=4))
    width = data.draw(st.integers(0, 6))
    responses = [data.draw(st.lists(token, min_size=width, max_size=width)) for _ in prompts]
    tokenizer = SimpleNamespace(pad_token_id=pad, decode=TOKENIZER.decode)
    made = as_rollout(prompts, responses, ends, tokenizer)
    kept = []
    for response in responses:
        cut = []
        for token in response:
            cut.append(token)
            if token in ends:
                break
        kept.append(cut)
    longest = max(len(p) + len(r) for p, r in zip(prompts, kept))
    assert made.input_ids.shape == (len(prompts), longest) and made.response_mask.shape == (len(prompts), longest - 1)
    for row, (prompt, response) in enumerate(zip(prompts, kept)):
        for t in range(longest):
            real = t < len(prompt) + len(response)
            assert made.input_ids[row, t] == ((prompt + response)[t] if real else pad)
            assert made.attention_mask[row, t] == real
            if t > 0:
                assert made.response_mask[row, t - 1] == (real and t >= len(prompt))
        assert made.prompt_lengths[row] == len(prompt)
        assert made.ended[row] == bool(set(response) & set(ends))
        assert made.texts[row] == TOKENIZER.decode(response, skip_special_tokens=True)


def sharp_llama(seed=0):
    """Greedy answers that differ from prompt to prompt."""
    model = llama(vocab=VOCABULARY, seed=seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3 if param.ndim > 1 else 1)
    return model.eval()


def step_by_step(model, prompt, steps, ends):
    """Greedy, without padding, masks or a cache."""
    ids = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


PROMPTS = [[5], [70, 80, 90, 100, 110], [1, 2, 3], [33, 44], [120, 3, 120, 3, 120, 3, 120]]


@pytest.mark.parametrize("batch", [0, 1, 2, 5])
def test_greedy_rollouts_are_those_of_one_prompt_at_a_time(batch):
    """An end token is chosen that cuts some answers at different places, and not all."""
    model = sharp_llama()
    free = [step_by_step(model, prompt, 9, []) for prompt in PROMPTS]
    places = {
        token: sorted(answer.index(token) for answer in free if token in answer) for answer in free for token in answer
    }
    end = max(places, key=lambda token: (0 < len(places[token]) < len(free), len(set(places[token])), token))
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=end, decode=TOKENIZER.decode)
    made = roll_out(Role(SimpleEngine(model)), tokenizer, PROMPTS, Sampling(9, greedy=True), seed=0, batch=batch)
    wanted = [step_by_step(model, prompt, 9, [end]) for prompt in PROMPTS]
    assert {len(answer) for answer in wanted} != {9} and any(len(answer) == 9 for answer in wanted)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, wanted)):
        length = len(prompt) + len(answer)
        assert made.input_ids[row, :length].tolist() == prompt + answer
        assert made.attention_mask[row].sum() == length
        assert made.response_mask[row].sum() == len(answer)
        assert made.ended[row] == (answer[-1] == end)
    assert model.training  # generating() leaves it as training has it


def sample(model, seed, **how):
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END, decode=TOKENIZER.decode)
    made = roll_out(Role(SimpleEngine(model)), tokenizer, PROMPTS * 3, Sampling(6, **how), seed)
    return made.input_ids.tolist()


def test_samples_follow_the_seed_alone():
    model = sharp_llama()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sample(model, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert sample(model, seed=3) == first and sample(model, seed=4) != first
    assert (
        sample(model, seed=5, top_k=1) == sample(model, seed=6, temperature=1e-6) == sample(model, seed=7, top_p=1e-9)
    )
    assert len({seed_of(0, i, r) for i in range(30) for r in range(30)}) == 900
    assert 0 <= seed_of(1, 2) < 2**63 and seed_of(1, 2) == seed_of(1, 2) != seed_of(2, 1)


def test_seeding_puts_the_generator_back():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(KeyError), seeded(9):
        torch.rand(7)
        raise KeyError
    assert torch.equal(torch.rand(3), wanted)


def test_samples_have_the_distribution_of_the_log_probabilities():
    """Frequencies of the first token at temperature 2 beside its softmax, four standard deviations."""
    model = sharp_llama()
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END, decode=TOKENIZER.decode)
    count = 4000
    made = roll_out(
        Role(SimpleEngine(model)), tokenizer, [PROMPTS[2]] * count, Sampling(1, temperature=2.0), seed=0, batch=1000
    )
    drawn = made.input_ids[:, 3].bincount(minlength=VOCABULARY) / count
    with torch.no_grad():
        wanted = (model(torch.tensor([PROMPTS[2]])).logits[0, -1] / 2).softmax(0)
    assert wanted.max() < 0.9
    assert ((drawn - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt() + 1e-3).all()


def test_the_models_own_generation_settings_do_not_leak():
    model, wanted = sharp_llama(), sample(sharp_llama(), seed=3)
    model.generation_config.update(
        do_sample=True, temperature=0.1, top_k=2, top_p=0.3, repetition_penalty=1.7, max_length=3, num_beams=2,
        no_repeat_ngram_size=1, min_new_tokens=5, suppress_tokens=[1, 2, 3], typical_p=0.3, min_p=0.5,
    )  # fmt: skip
    assert sample(model, seed=3) == wanted


def test_end_tokens_of_tokenizer_and_model():
    model, tokenizer = llama(), SimpleNamespace(eos_token_id=9)
    for configured, wanted in ((None, [9]), (4, [4, 9]), ([9, 7], [7, 9])):
        model.generation_config.eos_token_id = configured
        assert end_tokens(model, tokenizer) == wanted


def test_another_engine_gets_merged_weights_and_answers(adapter):
    model = load_policy(adapter, PLAIN, lora_of(adapter), reference=True)
    merged = load_policy(adapter, PLAIN, None).eval()
    taken = {}

    class StandIn:
        def update_weights(self, names_and_tensors):
            taken.update({name: tensor.clone() for name, tensor in names_and_tensors})
            self.model = llama(vocab=VOCABULARY, seed=9).eval()
            missing = self.model.load_state_dict(taken, strict=False)
            assert not missing.missing_keys and not missing.unexpected_keys

        def generate(self, prompts, sampling, seed):
            assert (sampling.max_new_tokens, seed) == (5, 8)
            return [step_by_step(self.model, prompt, 5, [END]) for prompt in prompts]

    made = roll_out(Role(SimpleEngine(model), POLICY), TOKENIZER, PROMPTS, Sampling(5), seed=8, other=StandIn())
    for row, prompt in enumerate(PROMPTS):
        wanted = prompt + step_by_step(merged, prompt, 5, [END])
        assert made.input_ids[row, : len(wanted)].tolist() == wanted


# --- batches -----------------------------------------------------------------------------------------------------


def test_rows_and_parts_of_batches():
    batch = rollout.Rollout(
        *(torch.arange(10).view(5, 2) for _ in range(3)), torch.arange(5), torch.arange(5) > 2, list("abcde")
    )
    picked = batch.rows([4, 0, 0])
    assert len(batch) == 5 and type(picked) is rollout.Rollout
    assert picked.texts == ["e", "a", "a"] and picked.prompt_lengths.tolist() == [4, 0, 0]
    assert picked.input_ids.tolist() == [[8, 9], [0, 1], [0, 1]]
    assert [part.texts for part in batch.parts(2)] == [["a", "b"], ["c", "d"], ["e"]]
    assert isinstance(batch.to(torch.device("cpu")), Batch)


# --- command lines -----------------------------------------------------------------------------------------------

NEEDED = ["--model", "m", "--out", "o", "--deepspeed_config", "c", "--data", "d"]


def ppo(monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *NEEDED, *more])
    return parse(PPOArguments, "")


def test_command_line(monkeypatch):
    arguments = ppo(
        monkeypatch, "--reward-functions", "a", "b", "--reward_weights", "1", "0.5", "--lora_rank", "4",
        "--top-p", "0.9", "--local_rank=1", "--whiten_rewards", "--no_whiten_advantages", "--kl_target", "6",
    )  # fmt: skip
    assert arguments.data == ["d"] and arguments.reward_functions == ["a", "b"] and arguments.reward_weights == [1, 0.5]
    assert (arguments.lora_rank, arguments.top_p, arguments.local_rank, arguments.kl_target) == (4, 0.9, 1, 6.0)
    assert arguments.whiten_rewards and not arguments.whiten_advantages and arguments.lora_alpha is None
    with pytest.raises(SystemExit):
        ppo(monkeypatch, "--kl_kind", "k4")


@pytest.mark.parametrize(
    "more, said",
    [
        (
            ["--reward_model", "r", "--rollout_batch", "12"],
            "--rollout_batch 12 .* of 4 .* x 2 .*: give a multiple of 8",
        ),
        ([], "nothing gives rewards: name --reward_model, --reward_functions, or both"),
        (
            ["--reward_functions", "gsm8k", "format", "--reward_weights", "1"],
            "--reward_weights has 1 numbers for 2 --rewar",
        ),
        (["--reward_functions", "exact"], "reward function 'exact': give one of exact_match"),
        (["--reward_model", "r", "--pretraining_coefficient", "1"], "name them with --pretraining_data"),
        (
            ["--reward_functions", "gsm8k", "gsm8k", "format", "--reward_weights", "1", "2", "3"],
            "--reward_functions gsm8k gsm8k format: name each once",
        ),
        (
            ["--reward_model", "r", "--kl_coefficient", "0", "--kl_target", "6"],
            "--kl_target changes --kl_coefficient by factors, and 0 would stay 0: give one above 0",
        ),
    ],
)
def test_rollouts_that_cannot_be_run_are_refused(monkeypatch, more, said):
    ds_config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    check_rollout(ppo(monkeypatch, "--reward_model", "r"), ds_config)
    with pytest.raises(ValueError, match=said):
        check_rollout(ppo(monkeypatch, *more), ds_config)


def test_lengths():
    config = llama().config  # 128 positions
    check_length(128, config, "--max_tokens")
    with pytest.raises(ValueError, match=r"--max_tokens make 129 tokens, but the model has 128 positions"):
        check_length(129, config, "--max_tokens")
    with pytest.raises(ValueError, match="but the model has 50 positions"):
        check_length(51, GPT2Config(n_positions=50), "--max_tokens")
    check_length(10**9, T5Config(), "--max_tokens")  # relative positions


def test_ds_configs_that_do_not_fit(tmp_path):
    def read(ds_config):
        path = tmp_path / "c.json"
        path.write_text(json.dumps(ds_config))
        return read_ds_config(SimpleNamespace(deepspeed_config=path))

    assert read({"zero_optimization": {"stage": 3}}) == {
        "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    for ds_config in ({}, {"zero_optimization": {"stage": 2}}, {"zero_optimization": 3}):
        with pytest.raises(ValueError, match=r'c.json: set "zero_optimization.stage" to 3'):
            read(ds_config)
    with pytest.raises(ValueError, match="\"gradient_accumulation_steps\" is 'auto'; give a number"):
        read({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"})
    with pytest.raises(ValueError, match='"train_batch_size" alone does not say what a step is made of; give'):
        read({"zero_optimization": {"stage": 3}, "train_batch_size": 64, "gradient_accumulation_steps": 2})
    with pytest.raises(ValueError, match='"gradient_accumulation_steps" is 0; give a number of at least 1'):
        read({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 0})
    with pytest.raises(ValueError, match='there is no recipe "zerop"'):
        read({"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "zerop"}})


def test_what_a_resumed_run_must_share(monkeypatch):
    def shared(world=2, ds_config=None, *more):
        return settings_of(ppo(monkeypatch, *more), ds_config or {"bf16": {"enabled": True}}, world)

    for may_change in (("--out", "p"), ("--save_every", "3"), ("--iterations", "7"), ("--resume",)):
        assert shared(2, None, *may_change) == shared()
    for fixed in (("--lr", "1"), ("--seed", "1"), ("--rollout_batch", "8"), ("--kl_target", "2"), ("--model", "n")):
        changed = shared(2, None, *fixed)
        assert [name for name in changed if changed[name] != shared()[name]] == [fixed[0]]
    assert shared(3)["the number of ranks"] == 3 and shared(2, {"bf16": {"enabled": False}}) != shared()
    cosine = shared(2, None, "--schedule", "cosine", "--warmup", "3")
    assert "--iterations" in cosine and "--iterations" not in shared()
    monkeypatch.setattr(sys, "argv", ["sft.py", *NEEDED])
    assert "--steps" not in settings_of(parse(SFTArguments, ""), {}, 1)
