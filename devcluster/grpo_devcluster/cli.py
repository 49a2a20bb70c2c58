"""Command line of the devcluster."""

import os
import sys
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.table import Table

from grpo_devcluster import binaries, images, storage
from grpo_devcluster.cluster import DEFAULT_NODES, Cluster


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """A real Kubernetes on this machine: control plane, nodes, images."""


@commands.command()
@click.option("--only", type=click.Choice(get_args(binaries.Scope)), default="all", show_default=True)
def build(only: binaries.Scope) -> None:
    """Build Kubernetes from pinned Go modules: for real nodes (cluster), for fake ones (controlplane), or for both."""
    click.echo(binaries.build(only))


@commands.command()
@click.option("--nodes", help=f"Name and GPU count of each node.  [default: {DEFAULT_NODES}]")
def up(nodes: str | None) -> None:
    """Start the programs of the cluster that do not run."""
    Cluster().up(nodes)


@commands.command()
def down() -> None:
    """Stop the cluster; logs and volumes stay until the next start."""
    Cluster().down()


@commands.command()
def status() -> None:
    """Show every program of the cluster; the exit status is 1 unless all of them run."""
    cluster = Cluster()
    table = Table("component", "pid", "log")
    for daemon in cluster.daemons():
        table.add_row(daemon.name, str(daemon.pid() or "-"), str(daemon.log))
    Console().print(table if cluster.exists() else "no cluster")
    sys.exit(0 if cluster.running() else 1)


@commands.command()
def kubeconfig() -> None:
    """Print the path of the administrator's kubeconfig."""
    click.echo(Cluster().kubeconfig)


@commands.command("bin-dir")
def bin_dir() -> None:
    """Print the folder of kubectl, helm and the others."""
    click.echo(binaries.bin_dir())


@commands.command()
@click.argument("component")
@click.option("--lines", "-n", default=100, show_default=True)
@click.option("--follow", "-f", is_flag=True)
def logs(component: str, lines: int, follow: bool) -> None:
    """Show the end of a component's log."""
    folder = Cluster().state / "logs"
    file = folder / f"{component}.log"
    if not file.exists():
        raise click.ClickException(
            f"no log of {component}; there are {', '.join(sorted(p.stem for p in folder.glob('*.log')))}"
        )
    os.execvp("tail", ["tail", f"--lines={lines}", *(["--follow"] if follow else []), str(file)])


@commands.command("kill-node")
@click.argument("name")
@click.option("--partition", is_flag=True, help="Leave the node's pods running, as when a node is cut off.")
def kill_node(name: str, partition: bool) -> None:
    """Lose a node: end its kubelet, its containerd and its pods."""
    Cluster().node(name).stop(partition=partition)


@commands.command("start-node")
@click.argument("name")
def start_node(name: str) -> None:
    """Bring a lost node back."""
    Cluster().start_node(name)


@commands.command("claim-path")
@click.argument("namespace")
@click.argument("name")
def claim_path(namespace: str, name: str) -> None:
    """Print the folder behind a bound claim."""
    click.echo(storage.claim_path(Cluster().kubeconfig, namespace, name))


@commands.group()
def image() -> None:
    """Build images and load them into the nodes; the archive's path is printed."""


@image.command("build-base")
def build_base() -> None:
    """Build the base image: Debian with python3."""
    click.echo(images.build_base())


@image.command("build-operator")
def build_operator() -> None:
    """Build the operator's image from operator/Dockerfile."""
    click.echo(images.build_operator())


@image.command("load")
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def load(archive: Path) -> None:
    """Import an archive into the containerd of every node."""
    Cluster().load(archive)


def main() -> None:
    """Run a command; show an error that a person can fix in a line, without a traceback."""
    try:
        commands(prog_name="grpo-devcluster")
    except (RuntimeError, LookupError, ValueError, FileNotFoundError, TimeoutError) as error:
        sys.stderr.write(f"devcluster: {error}\n")
        sys.exit(1)
