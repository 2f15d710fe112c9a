#!/usr/bin/env nextflow
//
// Plan a run, embed it in parts on many machines, and write its tables.
//
//   nextflow run examples/nextflow --input reads.fa --run /shared/run --parts 16 \
//       --options '--model M --head H --precision bf16' -profile slurm
//
// The run folder is where the processes meet: a path on a file system that all machines share, outside of
// Nextflow's work folder. So a process that is started again goes on with what is there.

process PLAN {
    label 'virnucpro_reads'

    input:
    path fasta
    val run
    val options

    output:
    val run

    script:
    """
    virnucpro predict --plan-only --resume --quiet --input ${fasta.toRealPath()} --output-dir '${run}' ${options}
    """

    stub:
    """
    mkdir -p '${run}'
    """
}

process WORK {
    label 'virnucpro_embeds'
    tag "${part}/${parts}"

    input:
    val run
    each part
    val parts
    val options

    output:
    val part

    script:
    """
    virnucpro work --quiet '${run}' --part ${part}/${parts} ${options}
    """

    stub:
    """
    test -d '${run}'
    """
}

process MERGE {
    label 'virnucpro_reads'

    input:
    path fasta
    val run
    val options
    val done

    output:
    path 'predictions.tsv'
    path 'viral.fasta'

    script:
    """
    virnucpro predict --resume --no-embed --quiet --input ${fasta.toRealPath()} --output-dir '${run}' ${options}
    cp '${run}/predictions.tsv' '${run}/viral.fasta' .
    """

    stub:
    """
    touch predictions.tsv viral.fasta
    """
}

workflow {
    if (!params.input || !params.run) {
        error "give --input FASTA and --run FOLDER, on a file system that all machines share"
    }
    fasta = file(params.input, checkIfExists: true)
    run = file(params.run).toAbsolutePath().toString()
    planned = PLAN(fasta, run, params.options)
    worked = WORK(planned, Channel.of(1..(params.parts as int)), params.parts, params.work_options)
    MERGE(fasta, run, params.options, worked.collect())
}
