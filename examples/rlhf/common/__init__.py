"""Common parts of the RLHF scripts. Each file is one idea.

arguments.py   the command lines: dataclasses, read with transformers.HfArgumentParser

tasks.py       tasks with exact answers, and preference pairs made from them
tokenizer.py   a byte-level tokenizer in Hugging Face format, with a chat template
sources.py     where rows come from: JSONL, JSON and parquet files, folders of them, Hugging Face data sets
rows.py        reading rows from these; the kinds of rows; bad rows
tokens.py      rows to token ids with the tokenizer's chat template; padding and masks
order.py       which rows step n of rank r sees: a pure function of (seed, step)
prompts.py     prompts to roll out from: their rows, tokens and texts
verifiers.py   reward functions by name

models.py      loading policy and scoring models, LoRA adapters, switching between adapters, saving
engines.py     DeepSpeed engines for a model that is trained and for one that is frozen
roles.py       policy, reference, critic and reward model over these engines
ema.py         a moving average of the weights that an engine trains
state.py       saving and resuming a whole run

batch.py       tensors that belong together, a row of each for every sequence
supervised.py  the loop of the stages that learn from rows: SFT, reward model, DPO
samples.py     what a policy that learns from rows says meanwhile
reference.py   log-probabilities of DPO's reference: computed once, and kept in a file
rollout.py     batched generation with its masks; a hook for another engine
rewards.py     the score of each response: reward functions and a reward model, weighted and added
advantage.py   KL penalty, rewards of tokens, generalized and group advantages, whitening, KL controllers
losses.py      log-probabilities and entropy; the losses of SFT, reward model, DPO, PPO and GRPO
rollout_stage.py  what PPO and GRPO do around their algorithms
evaluation.py  how a policy answers held-out prompts
figures.py     what an iteration of PPO or GRPO says of itself
monitor.py     console, JSON lines, DeepSpeed's monitor, progress bar, plots
intervals.py   95 % intervals of rates and of their differences
summary.py     what a pipeline came to: rates on held-out prompts, the last figures of the logs, a picture

Names and shapes are the same everywhere. B sequences of L tokens, right-padded in training: `input_ids` int64 [B, L],
`attention_mask` int64 [B, L] (1 = real token), `response_mask` bool [B, L-1], True at position t if token t+1 is one
that the policy chose (the end token included, the padding after it not). What is said "of a token" is [B, L-1] as well:
position t speaks of token t+1.
"""
