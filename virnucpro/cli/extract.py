"""The command ``extract``."""

from __future__ import annotations

from virnucpro.cli.command import ConsoleOptions, command
from virnucpro.cli.run_command import Workflow, run_command
from virnucpro.workflows.extract_options import ExtractOptions


@command(ExtractOptions, ConsoleOptions)
def extract(options: ExtractOptions, console: ConsoleOptions) -> None:
    """Embed FASTA or FASTQ with ESM-2, and write features.h5 and records.tsv.

    Proteins are embedded as they are. Nucleotides are chunked and translated as in predict. The
    default model is the published ESM-2 650M, from the torch hub or Hugging Face cache, or
    downloaded once (2.6 GB). All visible GPUs are used, else CPU cores. Exit codes are those of
    predict.

    Example: virnucpro extract -i proteins.faa -o features/

    Another ESM-2 on three GPUs, or continue such a run: virnucpro extract
    -i proteins.faa -o features/ --model esm2_t36_3B_UR50D --gpus 0,1,2 --resume

    Many files: virnucpro extract -i proteomes/ -i samples.tsv -o features/

    Three layers, two poolings and contacts in one pass: virnucpro extract -i proteins.faa
    -o outputs/ --layers 6,20,-1 --pooling mean,std --include contacts

    With half the disk space, and as Parquet too: virnucpro extract -i contigs.fa -o features/
    --store bfloat16 --format parquet
    """

    def load() -> Workflow[ExtractOptions]:
        from virnucpro.workflows.extract import extract as run

        return run

    run_command(options, console, load)
