"""The error for a former name suggests the current one, wherever the former name can be written."""

import pytest
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.errors import RENAMED, ConfigError, DdlsimError
from ddlsim.study import Range
from ddlsim.workload.stacks import Stack

ARGUMENTS = {
    ("aim", "objective"): lambda **named: ddlsim.Target(1000.0, **named),
    ("beside", "background"): lambda **named: ddlsim.Experiment("office-1gbe", **named),
    ("goes_on", "endless"): ddlsim.Job,
    ("lives", "n_timelines"): ddlsim.best_checkpoint_interval,
    ("notice", "detection"): ddlsim.Failures,
    ("slow_downs", "slowdowns"): lambda **named: ddlsim.Experiment("office-1gbe", **named),
    ("of", "total_cores"): ddlsim.Endpoints,
    ("ways", "degree"): ddlsim.ExpertParallel,
    ("whole", "integer"): Range,
    ("whole_below", "unsplit_below"): ddlsim.ServerWork,
    ("communicates", "slowdown_scope"): Stack,
    ("copies_gathered", "copies_gathered_weights"): Stack,
    ("gathers_operands", "gathers_low_precision_weights"): Stack,
    ("keeps_operands", "keeps_low_precision_inputs"): Stack,
    ("keeps_unread", "keeps_unused_outputs"): Stack,
    ("split_loss_nbytes", "sharded_loss_nbytes"): Stack,
    ("lr", "rate"): ddlsim.Training,
    ("gpus", "workers"): ddlsim.simulate,
    ("dp", "data"): ddlsim.Parallel,
    ("pp", "pipeline"): ddlsim.Parallel,
    ("tp", "tensor"): ddlsim.Parallel,
}  # fmt: skip
OF_STRATEGIES = {
    ("ddp", "all-reduce"), ("dp", "all-reduce"), ("tp", "parallel"), ("pp", "parallel"), ("pipeline", "parallel"),
    ("ps", "parameter-server"), ("zero1", "sharded-update"), ("zero3", "fsdp"),
}  # fmt: skip
OF_MODULE = {("Life", "FailureTimeline"), ("SlowDown", "Slowdown"), ("life", "reliability")}
OF_RESULT = {("drawn_faults", "sampled_faults"), ("life", "failure_timeline"), ("lives", "timelines")}
OF_JOBS = {("step_time_together", "concurrent_step_time")}
OF_TIMELINE = {
    ("away", "out_of_service"), ("goes_to", "breakdown"), ("noticing", "detecting"), ("saving", "checkpointing"),
    ("stretches", "running_intervals"),
}  # fmt: skip


@pytest.mark.parametrize(("former", "current"), ARGUMENTS)
def test_former_argument(former, current):
    with pytest.raises(ConfigError, match=rf"unknown argument '{former}'; did you mean '{current}'\?"):
        ARGUMENTS[former, current](**{former: 1})


def test_former_attribute():
    cluster, failures = "office-1gbe", ddlsim.Failures("5 h")
    result = ddlsim.simulate(cluster, steps=2, failures=failures, checkpoints=ddlsim.Checkpoints("1 h", stall="1 s"))
    jobs = ddlsim.simulate_jobs([ddlsim.Job(ddlsim.Experiment(cluster, workers=2, steps=2))])
    owners = [(ddlsim, OF_MODULE), (result, OF_RESULT), (jobs, OF_JOBS), (result.failure_timeline, OF_TIMELINE)]
    for owner, names in owners:
        for former, current in names:
            with pytest.raises(AttributeError, match=rf"no attribute '{former}'; did you mean '{current}'\?"):
                getattr(owner, former)
            assert hasattr(owner, current)


def test_former_key_and_option(tmp_path):
    file = tmp_path / "e.toml"
    file.write_text('cluster = "office-1gbe"\n[[beside]]\nrate = "1 Gbit/s"\n')
    for words, message in [
        (["run", str(file)], "e.toml: unknown key 'beside'; did you mean 'background'?"),
        (["recommend", "office-1gbe", "--aim", "cost"], "no such option: --aim; did you mean '--objective'? See"),
        *(
            (["run", "office-1gbe", "-s", old], f"strategy '{old}'; did you mean '{new}'?")
            for old, new in OF_STRATEGIES
        ),
    ]:
        with pytest.raises(DdlsimError) as error:
            CliRunner().invoke(cli.app, words, catch_exceptions=False)
        assert message in str(error.value)


def test_every_former_name_is_tried():
    assert set(RENAMED) <= {*ARGUMENTS, *OF_STRATEGIES, *OF_MODULE, *OF_RESULT, *OF_JOBS, *OF_TIMELINE}
