process VIRNUCPRO_PREDICT {
    tag "${meta.id}"
    label 'process_medium'

    conda "${moduleDir}/environment.yml"

    input:
    tuple val(meta), path(fasta)

    output:
    tuple val(meta), path("${prefix}.predictions.tsv"), emit: predictions
    tuple val(meta), path("${prefix}.viral.fasta"), emit: viral
    tuple val(meta), path("${prefix}.virnucpro.log"), emit: log
    path "versions.yml", emit: versions

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    virnucpro predict \\
        --quiet \\
        --strict \\
        ${args} \\
        --input ${fasta} \\
        --output-dir run

    mv run/predictions.tsv ${prefix}.predictions.tsv
    mv run/viral.fasta ${prefix}.viral.fasta
    mv run/virnucpro.log ${prefix}.virnucpro.log

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        virnucpro: \$(virnucpro --version | sed 's/virnucpro //')
    END_VERSIONS
    """

    stub:
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    touch ${prefix}.predictions.tsv ${prefix}.viral.fasta ${prefix}.virnucpro.log

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        virnucpro: \$(virnucpro --version | sed 's/virnucpro //')
    END_VERSIONS
    """
}
