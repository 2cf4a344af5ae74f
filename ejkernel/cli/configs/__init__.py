"""`ejkernel configs`: show, transfer and maintain what was tuned."""

from __future__ import annotations

import click

from ..options import Group, common
from .maintain import prune, verify
from .show import diff, explain, list_, show
from .transfer import export, import_, merge


@click.group(cls=Group)
@common
def configs() -> None:
    """Show stored configs, transfer and maintain them.

    PLACE is a folder with a store, the URL of a database, or a bundle file (*.json).
    """


for command in (list_, show, explain, diff, export, import_, merge, prune, verify):
    configs.add_command(command)
