"""The commands of `xds`, each a few lines around the module that does the work.

    xds up [--topology F] [--pace X] [--port P] [--detach]     xds chat PROMPT
    xds down                                                   xds verify --requests N --seed S
    xds status                                                 xds topology [--topology F]
    xds logs SERVICE [--follow]                                xds model info
    xds demo

Every command has `--json`. Exit codes: 0 ok, 1 failed, 2 bad input.
"""

from __future__ import annotations

import typer

from services.cli import look_commands, pod_commands
from services.cli.bench_commands import bench_app
from services.cli.verify_command import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run, watch and verify a disaggregated MoE serving pod.",
    pretty_exceptions_enable=False,
)
for command in (
    pod_commands.up,
    pod_commands.down,
    pod_commands.status,
    pod_commands.chat,
    verify,
    look_commands.topology,
    pod_commands.logs,
    look_commands.demo,
):
    app.command()(command)

model_app = typer.Typer(no_args_is_help=True, help="The served model.")
model_app.command("info")(look_commands.info)
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")
