"""A TrainEngine with a custom module on two real ranks: what a user of the engines relies on."""

import contextlib
import inspect
import threading
import warnings

import numpy as np
import pytest
import torch

import rlbench as rb
from rlbench.errors import BuildError, EngineError, MethodError, RemoteError, StateError
from tests.engines.modules import FlatRegressor, Regressor

pytestmark = pytest.mark.engine


def on_meta(width=8):
    with rb.device("meta"):
        return Regressor(width)


@pytest.fixture(scope="module")
def engine(cluster):
    made = rb.TrainEngine(on_meta(), executor="fsdp2", name="regressor")
    made.build(tensor_parallel_size=2, data_parallel_size=1)
    yield made
    made.close()


def test_results_are_a_flat_list_one_entry_per_rank(engine):
    assert [r[:3] for r in engine.where()] == [(0, 2, "cpu"), (1, 2, "cpu")]


def test_training_through_the_users_methods_lowers_the_loss(engine):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    y = 2 * x.sum(1, keepdim=True)
    losses = []
    for _ in range(30):
        losses.append(np.mean(engine.train_step(rb.NeedParallel(x), rb.NeedParallel(y))))
        engine.optimizer_step()
    assert losses[-1] < 0.5 * losses[0]


def test_rows_are_split_over_the_ranks(engine):
    assert engine.rows(rb.NeedParallel([1, 2, 3])) == [[1, 2], [3]]
    assert engine.rows([1, 2, 3]) == [[1, 2, 3], [1, 2, 3]]
    assert engine.rows(data=rb.NeedParallel(["only"])) == [["only"], ["only"]]


def test_methods_have_signature_docstring_and_completion(engine):
    assert list(inspect.signature(engine.train_step).parameters) == ["x", "y", "scale"]
    assert inspect.signature(engine.train_step).parameters["scale"].default == 1.0
    assert engine.train_step.__doc__ == "One backward on these rows; returns the loss."
    assert {"train_step", "optimizer_step", "where"} <= set(dir(engine))
    assert "_private" not in engine.methods() and "on_weights_materialized" not in engine.methods()


def test_a_typo_names_the_nearest_method_and_stays_in_the_cell(engine):
    with pytest.raises(MethodError, match="optimizer_step"):
        engine.optimzer_step()
    assert not hasattr(engine, "_repr_html_") and not hasattr(engine, "_ipython_canary_method_should_not_exist_")


def test_a_wrong_argument_is_an_error_before_anything_is_sent(engine):
    with pytest.raises(TypeError, match="data"):
        engine.rows(datta=[1])


def test_print_shows_with_its_rank(engine, capsys):
    engine.say("look here")
    out = capsys.readouterr().out
    assert out.count("look here") == 2 and "[rank 1] look here" in out


def test_forward_instead_of_call_is_explained(engine):
    with pytest.raises(EngineError, match=r"self\(\.\.\.\)"):
        engine.forgets_to_call(torch.zeros(2, 8))
    assert len(engine.where()) == 2


def test_the_users_exception_names_type_message_and_line_and_engine_stays_usable(engine):
    with pytest.raises(RemoteError, match="KeyError: 'missing field'") as error:
        engine.fails()
    assert "modules.py" in str(error.value) and "rank 0" in str(error.value)
    assert len(engine.where()) == 2


def test_an_exception_on_one_rank_only_ends_the_call(engine):
    with pytest.raises(RemoteError, match="rank one has had enough"):
        engine.fails_on_rank_one()
    assert len(engine.where()) == 2


def test_run_has_a_namespace_that_stays(engine):
    def put(value):
        global kept
        kept = value
        return rank, type(module).__name__, world_size  # noqa: F821

    def get():
        return kept + rank

    assert [r[0] for r in engine.run(put, 10)] == [0, 1]
    assert engine.run(get) == [10, 11]


def test_a_module_of_ones_own_is_saved_and_loaded(engine, tmp_path):
    kept = engine.state_dict()
    saved = engine.save(tmp_path / "weights")
    assert saved["files"] == ("model.safetensors",)
    for load in (
        lambda: engine.load(tmp_path / "weights"),
        lambda: engine.load(tmp_path / "weights" / "model.safetensors"),
        lambda: engine.load_state_dict(kept),
    ):
        engine.load_state_dict({name: tensor * 0 for name, tensor in kept.items()})
        assert not any(tensor.any() for tensor in engine.state_dict().values())
        load()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in engine.state_dict().items())


def test_large_arguments_warn_and_say_what_to_do(engine):
    with pytest.warns(UserWarning, match="NeedParallel"):
        engine.rows(np.zeros((2, 1 << 20)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.rows([1, 2, 3])


def test_building_twice_is_refused(engine):
    with pytest.raises(BuildError, match="built already"):
        engine.build(tensor_parallel_size=2)


def test_a_second_engine_needs_a_name_of_its_own(engine):
    with pytest.raises(BuildError, match="another name="):
        rb.TrainEngine(on_meta(), name="regressor").build(tensor_parallel_size=1, data_parallel_size=1)


def test_calls_before_build_say_so(cluster):
    unbuilt = rb.TrainEngine(on_meta(), name="unbuilt")
    with pytest.raises(MethodError, match=r"build\("):
        unbuilt.train_step([])
    with pytest.raises(EngineError, match="not built"):
        unbuilt.cuda()


def test_more_ranks_than_devices_are_refused_naming_the_mend(cluster):
    with pytest.raises(BuildError, match=r"wants 5 devices and the cluster has 4.*rb.init\(devices=5\)"):
        rb.TrainEngine(on_meta(), name="large").build(tensor_parallel_size=5)


def test_a_module_not_on_meta_is_refused(cluster):
    with pytest.raises(BuildError, match="meta"):
        rb.TrainEngine(Regressor())


def test_plain_meta_device_is_told_apart_and_refused():
    with torch.device("meta"):
        module = Regressor()
        module.register_buffer("angles", torch.ones(3))
    with pytest.raises(BuildError, match="init_empty_weights"):
        rb.TrainEngine(module)


def test_an_unknown_executor_names_the_known(cluster):
    with pytest.raises(BuildError, match="fsdp2"):
        rb.TrainEngine(on_meta(), executor="fsdp3")


def test_fsdp1_is_asked_for_in_build_and_computes_what_fsdp2_does(engine):
    """A callable says nothing of its base, so the engine learns it there."""
    with pytest.raises(BuildError, match="executor='fsdp1', and Regressor inherits from Fsdp2TrainModule"):
        rb.TrainEngine(on_meta(), name="wrong").build(tensor_parallel_size=2, executor="fsdp1")

    def make():
        with rb.device("meta"):
            return FlatRegressor()

    def steps(on):
        losses = []
        for _ in range(4):
            losses.append(on.train_step(rb.NeedParallel(x), rb.NeedParallel(2 * x.sum(1, keepdim=True))))
            on.optimizer_step()
        return np.array(losses)

    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    with (
        contextlib.closing(rb.TrainEngine(make, name="flat")) as flat,
        contextlib.closing(rb.TrainEngine(on_meta(), name="sharded")) as sharded,
    ):
        here = {"tensor_parallel_size": 2, "data_parallel_size": 1, "colocate_with": engine}
        flat.build(executor="FSDP1", **here)
        sharded.build(**here)
        assert "fsdp1" in repr(flat) and flat.info["executor"] == "fsdp1" and sharded.info["executor"] == "fsdp2"
        np.testing.assert_allclose(steps(flat), steps(sharded), rtol=0, atol=1e-5)
        assert not np.allclose(steps(flat)[0], steps(flat)[-1])


def test_one_rank_works_too_and_sits_beside_the_other_engine(engine):
    single = rb.TrainEngine(on_meta(), name="single").build(
        tensor_parallel_size=1, data_parallel_size=1, colocate_with=engine
    )
    assert single.where()[0][:2] == (0, 1)
    state = single.link.state()["engines"]
    assert state["single"]["devices"][0] in state["regressor"]["devices"]
    single.close()
    assert "single" not in single.link.state()["engines"]


def test_weights_of_initialisers_are_the_same_on_one_and_two_ranks(engine):
    fresh = rb.TrainEngine(on_meta(), name="fresh2").build(tensor_parallel_size=2, data_parallel_size=1)
    single = rb.TrainEngine(on_meta(), name="fresh1").build(tensor_parallel_size=1, data_parallel_size=1)
    sums = [e.call_all("state_checksum").result()[0] for e in (fresh, single)]
    fresh.close()
    single.close()
    assert sums[0] == sums[1]


def test_replicas_of_sharded_ranks_train_alike(cluster):
    grid = rb.TrainEngine(on_meta(), name="grid").build(tensor_parallel_size=2, data_parallel_size=2)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    grid.train_step(rb.NeedParallel(x), rb.NeedParallel(2 * x.sum(1, keepdim=True)))
    grid.optimizer_step()
    assert len(set(grid.call_all("state_checksum").result())) == 1 and len(grid.where()) == 4
    grid.close()


def test_offloading_is_measured_and_training_while_offloaded_is_refused(engine):
    engine.cpu("optimizer")
    engine.meta()
    assert engine.device() == "meta"
    with pytest.raises(StateError, match="cuda"):
        engine.train_step(torch.zeros(2, 8), torch.zeros(2, 1))
    engine.cuda()
    assert engine.device() == "cuda"
    engine.train_step(torch.zeros(2, 8), torch.zeros(2, 1))


def test_an_unknown_part_names_the_known(engine):
    with pytest.raises(StateError, match="weights, optimizer"):
        engine.cuda("kv_cache")


def test_what_cannot_travel_is_named_at_every_door(engine):
    lock = threading.Lock()

    def holds():
        return lock

    with pytest.raises(EngineError, match="`lock`") as ran:
        engine.run(holds)
    with pytest.raises(EngineError, match="`lock`"):
        engine.run(len, holds)
    with pytest.raises(EngineError, match="lock, which lives in this kernel alone"):
        engine.train_step(lock, torch.zeros(2, 1))
    assert "run `holds`" in str(ran.value)
    engine.train_step(torch.zeros(2, 8), torch.zeros(2, 1))
