process VIRNUCPRO_PREDICT {
    tag "${meta.id}"
    label 'process_medium'

    conda "${moduleDir}/environment.yml"

    input:
    tuple val(meta), path(fasta)

    output:
    tuple val(meta), path("${prefix}.viruses.tsv"), emit: viruses
    tuple val(meta), path("${prefix}.viruses.fasta"), emit: viruses_fasta
    tuple val(meta), path("${prefix}.predictions.tsv"), emit: predictions
    tuple val(meta), path("${prefix}.report.html"), emit: report
    tuple val(meta), path("${prefix}.virnucpro.log"), emit: log
    tuple val("${task.process}"), val('virnucpro'), eval("virnucpro --version | sed 's/virnucpro //'"), topic: versions, emit: versions_virnucpro

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    virnucpro predict \\
        --quiet \\
        --strict \\
        --workers ${task.cpus} \\
        ${args} \\
        --input ${fasta} \\
        --output-dir run

    for name in viruses.tsv viruses.fasta predictions.tsv report.html virnucpro.log; do
        mv "run/\$name" "${prefix}.\$name"
    done
    """

    stub:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    echo ${args}
    touch ${prefix}.viruses.tsv ${prefix}.viruses.fasta ${prefix}.predictions.tsv ${prefix}.report.html ${prefix}.virnucpro.log
    """
}
