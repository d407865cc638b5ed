"""PipelineTrainer beside the plain Trainer on one process: losses, weights, checkpoints."""

from __future__ import annotations

import functools
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, Trainer

from penstock.errors import StageError
from penstock.integrations import transformers as trainer_module
from penstock.integrations.transformers import PipelineTrainer
from tests.distributed.launches import results_of
from tests.integrations import trainer_runs
from tests.integrations.trainer_runs import (
    CASES,
    EXACT,
    OTHERS,
    REPLICA_CASES,
    RESUMED,
    collate,
    llama,
    lora,
    piped,
    results,
    run,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("trainer"))
    os.environ.pop("LOCAL_RANK", None)
    plain("llama", made, f"{made}/plain llama")  # whose checkpoint a pipeline resumes from
    return made


@functools.cache
def plain(name: str, folder: str, place: str | None = None) -> dict[str, Any]:
    """The results of the plain Trainer in this process."""
    trainer = run(Trainer, name, place or f"{folder}/plain {name}")
    trainer.train()
    return results(trainer)


def by_pipeline(folder: str, name: str) -> list[Any]:
    """By rank, what a case returns; all cases of as many ranks run in one launch."""
    if name in REPLICA_CASES:
        cases = tuple((folder, each) for each in REPLICA_CASES)
        return results_of(piped, 4, cases, (folder, name))
    cases = tuple((folder, each) for each in [*CASES, "dropout", *OTHERS])
    return results_of(piped, 2, cases, (folder, name))


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any], rtol: float = 2e-5) -> None:
    """The same logs and weights, to rounding; a norm is summed over ranks in another order."""
    for mine, expected in zip(ours["logs"], theirs["logs"], strict=True):
        norms = [entry.get("grad_norm", 0.0) for entry in (mine, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=2e-5)
        assert {**mine, "grad_norm": 0} == pytest.approx({**expected, "grad_norm": 0}, rel=rtol)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=rtol, atol=rtol, msg=name)


def without_mean(found: dict[str, Any]) -> dict[str, Any]:
    """Without the mean loss at the end, which is that of the steps since a run was resumed."""
    return {**found, "logs": [{**entry, "train_loss": 0.0} for entry in found["logs"]]}


@pytest.mark.parametrize("name", [*CASES, *REPLICA_CASES])
def test_trains_as_the_plain_trainer(name: str, folder: str) -> None:
    expected = plain(name, folder)
    assert len(expected["logs"]) > 2
    for ours in by_pipeline(folder, name):
        assert_alike(ours, expected, rtol=0.0 if name in EXACT else 2e-5)
        assert (ours["step"], ours["best"]) == (expected["step"], pytest.approx(expected["best"]))


def test_stops_early_and_takes_the_best_model(folder: str) -> None:
    stopped = plain("early stopping", folder)
    assert stopped["step"] < 16, "it stopped early"
    losses = [entry["eval_loss"] for entry in stopped["logs"] if "eval_loss" in entry]
    assert losses[-1] > min(losses) == stopped["best"]


def test_resumes_as_if_it_had_not_been_interrupted(folder: str) -> None:
    """From its own checkpoint, and from one that the plain Trainer wrote."""
    for rank, resumed in enumerate(by_pipeline(folder, "resume")):
        *own, others = map(without_mean, resumed)
        for name, found in zip(RESUMED, own, strict=True):
            assert_alike(found, without_mean(by_pipeline(folder, name)[rank]), rtol=0.0)
        assert_alike(others, without_mean(by_pipeline(folder, "llama")[rank]))


@pytest.mark.parametrize("name", ["llama", "tied", "lora", "replicas"])
def test_the_plain_trainer_resumes_from_its_checkpoint(name: str, folder: str) -> None:
    by_pipeline(folder, name)
    trainer = run(Trainer, name, f"{folder}/plain resumed {name}")
    trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
    assert_alike(without_mean(results(trainer)), without_mean(plain(name, folder)))


def test_the_saved_model_is_the_trained_one(folder: str) -> None:
    trained = by_pipeline(folder, "llama")[0]["weights"]
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/llama model").state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in saved.items())


def test_adapters_are_saved_whole(folder: str) -> None:
    """Plain peft loads them, and the model computes what the trained one does."""
    trained = by_pipeline(folder, "lora")[0]["weights"]
    loaded: Any = peft.PeftModel.from_pretrained(llama(), f"{folder}/lora model")
    saved = load_file(f"{folder}/lora model/adapter_model.safetensors")
    assert sum("lora_A" in name for name in saved) == 2 * 2, "of the layers of all stages"
    assert all("lora" in name for name in saved)
    expected = lora()
    expected.load_state_dict(trained)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        wanted, plain_one = expected.eval()(ids).logits, llama().eval()(ids).logits
        torch.testing.assert_close(loaded.eval()(ids).logits, wanted)
    assert not torch.allclose(wanted, plain_one)


def test_one_rank_writes_the_board(folder: str) -> None:
    first, second = by_pipeline(folder, "report")
    assert len(first) == 1 and second == []
    (place,) = Path(f"{folder}/board 0").rglob("events*")
    board = EventAccumulator(str(place.parent))
    board.Reload()
    losses = [event.value for event in board.Scalars("train/loss")]
    expected = [e["loss"] for e in plain("no limit", folder)["logs"] if "loss" in e]
    assert losses == pytest.approx(expected, rel=2e-5)


def test_predicts_without_training(folder: str) -> None:
    trainer = run(Trainer, "llama", f"{folder}/plain predict")
    output: Any = trainer.predict(trainer.eval_dataset)  # type: ignore[arg-type]
    for scores, labels in by_pipeline(folder, "predict"):
        torch.testing.assert_close(scores, torch.from_numpy(output.predictions))
        assert torch.equal(labels, torch.from_numpy(output.label_ids))


def test_an_optimizer_of_the_whole_model(folder: str) -> None:
    model = llama()
    args = trainer_runs.settings(f"{folder}/plain given", {"lr_scheduler_type": "constant"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data: Any = trainer_runs.texts(0, 28)
    trainer = Trainer(model, args, collate, data, optimizers=(optimizer, None))
    trainer.train()
    for ours in by_pipeline(folder, "given optimizer"):
        assert_alike(ours, results(trainer))


def test_the_state_of_an_optimizer_that_a_subclass_makes_is_saved_whole(folder: str) -> None:
    number = len([*llama().parameters()])
    assert by_pipeline(folder, "own optimizer") == [number] * 2


def test_a_loss_of_two_calls_is_refused(folder: str) -> None:
    for message in by_pipeline(folder, "twice"):
        assert "compute_loss() calls the model twice" in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp16": True}, "support fp16; leave it out"),
        ({"fsdp": True, "auto_find_batch_size": True}, "auto_find_batch_size, fsdp;"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    args = trainer_runs.settings(str(tmp_path), given)
    with pytest.raises(ValueError, match=said):
        PipelineTrainer(llama(), args)


def test_other_mistakes(tmp_path: Path) -> None:
    args = trainer_runs.settings(str(tmp_path), {})
    args._n_gpu = 2  # as Trainer counts them without torchrun
    with pytest.raises(ValueError, match="one process sees 2 GPUs: run one for each"):
        PipelineTrainer(llama(), args)
    args._n_gpu = 0
    with pytest.raises(ValueError, match="does not support model_init; pass the model"):
        PipelineTrainer(args=args, model_init=lambda: llama())
    with pytest.raises(TypeError, match="multiple values for keyword argument 'n_microbatches'"):
        PipelineTrainer(llama(), args, pipeline={"n_microbatches": 2})
    with pytest.raises(ValueError, match="replicas=2 does not divide 1 processes"):
        PipelineTrainer(llama(), args, replicas=2)


def test_in_one_process(folder: str) -> None:
    trainer = run(PipelineTrainer, "llama", f"{folder}/one process", pipeline={"ranks": 2})
    trainer.train()
    assert_alike(results(trainer), plain("llama", folder))


def test_a_loss_is_told_of_an_evaluation_and_of_the_configuration(tmp_path: Path) -> None:
    def of(kind: type[Trainer], **options: Any) -> float:
        class Told(kind):  # type: ignore[misc, valid-type]
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                out = model(**inputs)
                return out.loss * model.config.vocab_size + model.training, out

        trainer = run(Told, "llama", str(tmp_path), **options)
        return float(trainer.evaluate()["eval_loss"])

    assert of(PipelineTrainer, pipeline={"ranks": 2}) == pytest.approx(of(Trainer), rel=1e-6)


def test_a_penalty_on_the_parameters_is_refused(tmp_path: Path) -> None:
    class Penalized(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            penalty = sum(param.pow(2).sum() for param in model.parameters())
            return model(**inputs).loss + penalty

    with pytest.raises(StageError, match="add their penalty within the model"):
        run(Penalized, "llama", str(tmp_path), pipeline={"ranks": 2}).train()


def test_dropout_does_not_depend_on_the_ranks(folder: str) -> None:
    trainer = run(PipelineTrainer, "dropout", f"{folder}/one", pipeline={"ranks": 1})
    trainer.train()
    for ours in by_pipeline(folder, "dropout"):
        assert_alike(ours, results(trainer))
    assert results(trainer)["logs"] != plain("tied", folder)["logs"]


def test_only_public_names_of_trainer_and_accelerate_are_used() -> None:
    """Neither read, nor overridden, nor taken for other things by chance."""

    def private(module: ModuleType) -> set[str]:
        source = inspect.getsource(module)
        return set(re.findall(r"(?:\.|def )(_[a-z]\w*)", source))

    theirs = private(inspect.getmodule(Trainer)) | private(inspect.getmodule(Accelerator))  # type: ignore[arg-type]
    assert len(theirs) > 50
    assert not private(trainer_module) & theirs
