"""The embedded recipe on the real engines, over seeds: learning is the rule; shuffled advantages do not learn."""

import pytest
import torch

import rlbench as rb
from rlbench.tiny import recipe, tasks

pytestmark = [pytest.mark.engine, pytest.mark.long]
SEEDS = range(5)


def train(session, seed, advantage):
    """Greedy accuracy on unseen prompts before and after the recipe's steps, from the checkpoint's weights."""
    session.train.meta()
    session.train.cuda()
    session.sync_weights()
    unseen = tasks.prompts(recipe.eval_prompts, split="eval")
    prompts = tasks.prompts(recipe.prompts_per_step * recipe.steps, seed=seed)
    before = session.evaluate(unseen, tasks.reward, max_tokens=recipe.max_tokens, progress=False).reward
    for step in range(recipe.steps):
        asked = prompts[step * recipe.prompts_per_step : (step + 1) * recipe.prompts_per_step]
        rollouts = session.rollout(asked, n=recipe.n, max_tokens=recipe.max_tokens, progress=False)
        session.train_step(rollouts.score(tasks.reward).batch(advantage=advantage))
        session.sync_weights()
    return before, session.evaluate(unseen, tasks.reward, max_tokens=recipe.max_tokens, progress=False).reward


@pytest.fixture(scope="module")
def recipe_session(cluster, tiny_path):
    options = {"lr": recipe.lr, "betas": recipe.betas, "max_norm": recipe.grad_clip}
    made = rb.Session("tiny", name="recipe", train=options)
    yield made
    made.close()


def test_grpo_passes_ninety_percent_on_at_least_four_of_five_seeds(recipe_session):
    ends = [train(recipe_session, seed, rb.rl.group_normalized()) for seed in SEEDS]
    print(ends)
    assert sum(after > 0.9 for _, after in ends) >= 4
    assert all(0.15 <= before <= 0.40 for before, _ in ends)


def test_shuffled_advantages_do_not_learn(recipe_session):
    generator = torch.Generator().manual_seed(0)

    def shuffled(rewards, group):
        advantages = rb.rl.group_normalized()(rewards, group)
        return advantages[torch.randperm(len(advantages), generator=generator)]

    before, after = train(recipe_session, 0, shuffled)
    assert after < before + 0.05
