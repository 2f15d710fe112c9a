"""The proteins of ``models check``: the same letters on every machine, from 1 to 1,022 residues.

1,022 residues are what ESM-2 was trained on at most. ``random.Random.random`` gives the same
numbers in every version of Python, which no other generator promises.
"""

from __future__ import annotations

from random import Random

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
ODD_LETTERS = "XBZUOJ.-*"  # J and * have no token of their own, and read as <unk>
LENGTHS = (1, 2, 3, 5, 9, 16, 33, 50, 63, 64, 100, 128, 166, 167, 257, 400, 512, 777, 1022)
_SEED = 1
_KNOWN = {
    "ubiquitin": ("MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"),
    "lysozyme": (
        "KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPC"
        "SALLSSDITASVNCAKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL"
    ),
    "gfp": (
        "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTLVTTFSYGVQCFSRYPDHMKQ"
        "HDFFKSAMPEGYVQERTIFFKDDGNYKTRAEVKFEGDTLVNRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNG"
        "IKVNFKIRHNIEDGSVQLADHYQQNTPIGDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTAAGITHGMDELYK"
    ),
}
_EVERY = 5  # residue of a known protein, replaced by an odd letter


def make_panel() -> dict[str, str]:
    """Proteins by id: known ones, random ones, and some with odd letters or in lower case."""
    rng, ubiquitin = Random(_SEED), _KNOWN["ubiquitin"]
    panel = dict(_KNOWN)
    for length in LENGTHS:
        letters = [AMINO_ACIDS[int(rng.random() * len(AMINO_ACIDS))] for _ in range(length)]
        panel[f"random_{length}"] = "".join(letters)
    for letter in ODD_LETTERS:
        letters = list(ubiquitin)
        letters[::_EVERY] = letter * len(letters[::_EVERY])
        panel[f"odd_{letter}"] = "".join(letters)
    panel["odd_all"] = 7 * ODD_LETTERS
    panel["only_X"] = 40 * "X"
    panel["lower_case"] = ubiquitin.lower()
    return panel
