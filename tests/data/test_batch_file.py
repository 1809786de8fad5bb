"""A batch leaves and comes back the same, to the last bit; what is no such file is refused."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from rlbench.data import Rollouts, TrainBatch, load
from rlbench.errors import DataError
from tests.data.comparing import batch, centred, equal, full
from tests.data.values import rollouts
from tests.data.written import sorting, stepped


def through(made, folder):
    return TrainBatch.from_parquet(made.to_parquet(folder / "b.parquet"))


def rich():
    made = batch(stepped(sorting()))
    return made.replace(
        old_logprobs=made.sampler_logprobs - 1,
        ref_logprobs=made.sampler_logprobs * 2,
        temperature=0.1 + 0.2,
        mask=np.arange(made.tokens) % 3 == 0,
    )


@pytest.mark.parametrize(
    "make",
    [
        batch,
        rich,
        lambda: batch().rows([]),
        lambda: batch()[::-1],
        lambda: batch().replace(rewards=None, truncated=None),
        lambda: batch().replace(advantages=np.array([np.nan, np.inf, -0.0] * 7, np.float64)),
        lambda: batch().rows([0, 0, 5]),
        lambda: batch(full()),
    ],
    ids=["plain", "all fields", "empty", "reversed", "without rewards", "not finite, float64", "repeated", "turns"],
)
def test_a_batch_comes_back_equal(make, tmp_path):
    made = make()
    again = through(made, tmp_path)
    assert equal(again, made) and again.key == made.key
    assert np.signbit(again.advantages).tolist() == np.signbit(made.advantages).tolist()
    assert [f.name for f in tmp_path.iterdir()] == ["b.parquet"]


def test_any_tool_can_read_it(tmp_path):
    made = rich()
    table = parquet.read_table(made.to_parquet(tmp_path / "b.parquet")).to_pandas()
    assert len(table) == len(made) and table["rewards"].tolist() == made.rewards.tolist()
    assert table["token_ids"][2].tolist() == made.responses[2].tolist()
    assert len(table["advantages"][2]) == len(made.responses[2])


def test_rollouts_from_a_file_give_the_batch_they_gave_before(tmp_path):
    for made in (sorting(scored=False), full()):
        again = Rollouts.from_parquet(made.to_parquet(tmp_path / "r.parquet"))
        assert equal(*(r.score(lambda one: len(one)).batch(centred) for r in (made, again)))


def test_other_files_are_refused(tmp_path):
    rollouts().to_parquet(tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"not written by batch.to_parquet\(\): it holds the columns prompt_index"):
        TrainBatch.from_parquet(tmp_path / "r.parquet")
    batch().to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"not written by rollouts.to_parquet"):
        Rollouts.from_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="holds rollouts or a batch"):
        load(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no file"):
        TrainBatch.from_parquet(tmp_path / "none.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 text")
    with pytest.raises(DataError, match="no Parquet file"):
        TrainBatch.from_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="no folder"):
        batch().to_parquet(tmp_path / "missing" / "b.parquet")


def changed(path, columns=None, **facts):
    """The file with other columns, or other facts in its metadata."""
    table = parquet.read_table(path)
    about = {**json.loads(table.schema.metadata[b"rlbench.batch"]), **facts}
    for name, values in (columns or {}).items():
        table = table.set_column(table.schema.get_field_index(name), name, values(table[name]))
    parquet.write_table(table.replace_schema_metadata({b"rlbench.batch": json.dumps(about).encode()}), path)
    return path


def raised(column):
    return pyarrow.array([[token + 1 for token in row] for row in column.to_pylist()])


def shorter(column):
    return pyarrow.array([row[:-1] for row in column.to_pylist()])


@pytest.mark.parametrize(
    ("columns", "facts", "said"),
    [
        ({"token_ids": raised}, {}, "tokens are others"),
        ({"advantages": shorter}, {}, "advantages is not as long as the token ids"),
        ({"group": lambda c: pyarrow.array(["x"] * len(c))}, {}, "was changed since"),
        ({"token_ids": lambda c: pyarrow.array([None] * len(c), c.type)}, {}, "is missing"),
        ({}, {"dtypes": {"prompts": "<i4"}}, "was changed since"),
        ({}, {"format": 99}, "format 99"),
    ],
)
def test_a_changed_file_is_refused(columns, facts, said, tmp_path):
    path = batch().to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=said):
        TrainBatch.from_parquet(changed(path, columns, **facts))


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = batch().to_parquet(tmp_path / "b.parquet")
    before = path.read_bytes()
    with pytest.raises(DataError, match="rewards are object"):
        batch().replace(rewards=np.array([{}] * 6)).to_parquet(path)

    def broken(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(parquet, "write_table", broken)
    with pytest.raises(KeyboardInterrupt):
        rich().to_parquet(path)
    assert path.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["b.parquet"]
