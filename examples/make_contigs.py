"""Write the example contigs: known proteins, back-translated into synthetic DNA.

Each contig holds the proteins of one organism, in order, with short random spacers before,
between and after them; about half of the contigs lie on the reverse strand. Codons are drawn as
often among their synonyms as in the genes of a host or a virus of that kind. Viral contigs stand
among cellular ones, and the ids say which is which. The same bytes come out of every run, and a
contig's bases depend on its own id and proteins alone.

The proteins were written down from general knowledge, so a residue may differ from the
reference sequence of a database.

    python make_contigs.py [PATH]    (default: contigs.fa beside this script)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal

LINE_BASES = 60
SPACER_BASES = (6, 30)  # shortest and longest
ID_PREFIX = {"viral": "example_virus", "cellular": "example_host"}

# the standard genetic code, codons in the order of product("TCAG", repeat=3)
GENETIC_CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
# how many of 1,000 codons are TTT, TTC, TTA, TTG, TCT ..., in the order of the genetic code
CODON_USAGE = {
    # Homo sapiens, 93,487 genes: Codon Usage Database, Nakamura et al. 2000,
    # doi:10.1093/nar/28.1.292
    "animal": (
        "17.6 20.3 7.7 12.9 15.2 17.7 12.2 4.4 12.2 15.3 1.0 0.8 10.6 12.6 1.6 13.2 13.2 19.6 7.2 "
        "39.6 17.5 19.8 16.9 6.9 10.9 15.1 12.3 34.2 4.5 10.4 6.2 11.4 16.0 20.8 7.5 22.0 13.1 "
        "18.9 15.1 6.1 17.0 19.1 24.4 31.9 12.1 19.5 12.2 12.0 11.0 14.5 7.1 28.1 18.4 27.7 15.8 "
        "7.4 21.8 25.1 29.0 39.6 10.8 22.2 16.5 16.5"
    ),
    # Escherichia coli K-12 MG1655, NC_000913.3: counted over 1,034 genes
    "bacterium": (
        "20.6 18.8 12.0 12.6 9.4 9.7 6.0 7.9 14.6 12.8 2.8 0.3 4.8 6.1 1.1 13.1 9.8 10.5 3.1 57.6 "
        "6.3 4.2 7.8 23.5 11.3 10.4 13.3 28.5 24.8 22.5 2.8 3.9 31.6 29.8 2.7 26.8 9.6 24.1 5.4 "
        "12.5 14.4 22.7 36.1 11.3 7.1 15.3 1.4 0.7 21.6 15.4 12.6 26.3 17.3 23.1 20.3 32.5 30.3 "
        "20.8 43.6 17.8 28.3 30.0 6.2 9.6"
    ),
    # phage lambda, NC_001416.1: counted over 41 genes
    "phage": (
        "19.2 15.3 5.5 4.9 5.8 12.4 10.4 8.2 17.7 12.5 1.8 0.3 2.6 7.8 2.2 16.9 12.9 8.4 2.3 43.3 "
        "7.2 5.3 6.9 20.6 10.6 5.0 7.0 38.3 19.2 18.3 4.9 11.2 21.9 21.9 6.6 24.4 8.3 24.8 11.2 "
        "20.8 14.4 21.9 31.7 21.2 11.1 18.4 6.5 4.2 19.2 13.1 8.8 26.6 16.8 29.7 27.5 27.2 31.9 "
        "25.4 36.0 30.0 19.5 25.7 12.8 15.8"
    ),
    # SARS-CoV-2 Wuhan-Hu-1, MN908947.3: counted over 10 genes
    "RNA virus": (
        "34.9 14.7 23.9 19.2 22.5 6.5 19.5 1.7 24.8 18.4 1.1 0.0 22.2 6.8 0.3 11.0 30.0 10.0 9.8 "
        "5.2 20.1 3.7 15.8 1.6 11.5 5.2 26.7 12.9 8.6 3.1 2.0 1.0 28.0 10.8 15.3 19.1 34.8 8.2 "
        "30.0 3.4 35.4 18.4 37.2 20.8 16.1 4.2 14.0 5.2 39.8 10.5 16.7 12.2 36.1 9.8 19.2 3.3 "
        "29.4 18.0 34.9 13.7 34.9 11.6 12.3 2.0"
    ),
}
USAGE_OF = {
    "Homo sapiens": "animal",
    "Gallus gallus": "animal",
    "Bos taurus": "animal",
    "Photinus pyralis": "animal",
    "Escherichia coli": "bacterium",
    "phage lambda": "phage",
    "phage M13": "phage",
    "phage MS2": "phage",
    "phage T4": "phage",
    "phage T7": "phage",
    "phage phiX174": "phage",
    "HIV-1": "RNA virus",
    "SARS-CoV-2": "RNA virus",
    "influenza A virus": "RNA virus",
    "tobacco mosaic virus": "RNA virus",
}


@dataclass(frozen=True, slots=True)
class Protein:
    """A protein as it is known in public; ``sequence`` has one letter per residue, no stop."""

    name: str
    organism: str
    kind: Literal["viral", "cellular"]
    sequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contig:
    """The proteins of one organism in the order of their genes; ``reverse`` flips the strand."""

    reverse: bool
    proteins: tuple[Protein, ...]

    def __post_init__(self) -> None:
        sources = {(protein.organism, protein.kind) for protein in self.proteins}
        assert len(sources) == 1, f"a contig comes from one organism, not from {sources}"

    @property
    def kind(self) -> Literal["viral", "cellular"]:
        return self.proteins[0].kind

    @property
    def codon_usage(self) -> str:
        return USAGE_OF[self.proteins[0].organism]

    @property
    def description(self) -> str:
        names = ", ".join(protein.name for protein in self.proteins)
        return f"synthetic back-translation of: {names} ({self.proteins[0].organism})"


CONTIGS = (
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "haemoglobin alpha",
                "Homo sapiens",
                "cellular",
                "MVLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAVAHVDDMPNA"
                "LSALSDLHAHKLRVDPVNFKLLSHCLLVTLAAHLPAEFTPAVHASLDKFLASVSTVLTSKYR",
            ),
            Protein(
                "haemoglobin beta",
                "Homo sapiens",
                "cellular",
                "MVHLTPEEKSAVTALWGKVNVDEVGGEALGRLLVVYPWTQRFFESFGDLSTPDAVMGNPKVKAHGKKVLGAFSDGLAHLD"
                "NLKGTFATLSELHCDKLHVDPENFRLLGNVLVCVLAHHFGKEFTPPVQAAYQKVVAGVANALAHKYH",
            ),
            Protein(
                "myoglobin",
                "Homo sapiens",
                "cellular",
                "MGLSDGEWQLVLNVWGKVEADIPGHGQEVLIRLFKGHPETLEKFDKFKHLKSEDEMKASEDLKKHGATVLTALGGILKKK"
                "GHHEAEIKPLAQSHATKHKIPVKYLEFISECIIQVLQSKHPGDFGADAQGAMNKALELFRKDMASNYKELGFQG",
            ),
            Protein(
                "serum albumin",
                "Homo sapiens",
                "cellular",
                "MKWVTFISLLFLFSSAYSRGVFRRDAHKSEVAHRFKDLGEENFKALVLIAFAQYLQQCPFEDHVKLVNEVTEFAKTCVAD"
                "ESAENCDKSLHTLFGDKLCTVATLRETYGEMADCCAKQEPERNECFLQHKDDNPNLPRLVRPEVDVMCTAFHDNEETFLK"
                "KYLYEIARRHPYFYAPELLFFAKRYKAAFTECCQAADKAACLLPKLDELRDEGKASSAKQRLKCASLQKFGERAFKAWAV"
                "ARLSQRFPKAEFAEVSKLVTDLTKVHTECCHGDLLECADDRADLAKYICENQDSISSKLKECCEKPLLEKSHCIAEVEND"
                "EMPADLPSLAADFVESKDVCKNYAEAKDVFLGMFLYEYARRHPDYSVVLLLRLAKTYETTLEKCCAAADPHECYAKVFDE"
                "FKPLVEEPQNLIKQNCELFEQLGEYKFQNALLVRYTKKVPQVSTPTLVEVSRNLGKVGSKCCKHPEAKRMPCAEDYLSVV"
                "LNQLCVLHEKTPVSDRVTKCCTESLVNRRPCFSALEVDETYVPKEFNAETFTFHADICTLSEKERQIKKQTALVELVKHK"
                "PKATKEQLKAVMDDFAAFVEKCCKADDKETCFAEEGKKLVAASQAALGL",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "movement protein",
                "tobacco mosaic virus",
                "viral",
                "MALVVKGKVNINEFIDLTKMEKILPSMFTPVKSVMCSKVDKIMVHENESLSEVNLLKGVKLIDSGYVCLAGLVVTGEWNL"
                "PDNCRGGVSVCLVDKRMERADEATLGSYYTAAAKKRFQFKVVPNYAITTQDAMKNVWQVLVNIRNVKMSAGFCPLSLEFV"
                "SVCIVYRNNIKLGLREKITNVRDGGPMELTEEVVDEFMEDVPMSIRLAKFRSRTGKKSDVRKGKNSSNDRSVPNKNYRNV"
                "KDFGGMSFKKNNLIDDDSEATVAESDSF",
            ),
            Protein(
                "coat protein",
                "tobacco mosaic virus",
                "viral",
                "MSYSITTPSQFVFLSSAWADPIELINLCTNALGNQFQTQQARTVVQRQFSEVWKPSPQVTVRFPDSDFKVYRYNAVLDPL"
                "VTALLGAFDTRNRIIEVENQANPTTAETLDATRRVDDATVAIRSAINNLIVELIRGTGSYNRSSFESSSGLVWTSGPAT",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "thioredoxin 1",
                "Escherichia coli",
                "cellular",
                "MSDKIIHLTDDSFDTDVLKADGAILVDFWAEWCGPCKMIAPILDEIADEYQGKLTVAKLNIDQNPGTAPKYGIRGIPTLL"
                "LFKNGEVAATKVGALSKGQLKEFLDANLA",
            ),
            Protein(
                "dihydrofolate reductase",
                "Escherichia coli",
                "cellular",
                "MISLIAALAVDRVIGMENAMPWNLPADLAWFKRNTLNKPVIMGRHTWESIGRPLPGRKNIILSSQPGTDDRVTWVKSVDE"
                "AIAACGDVPEIMVIGGGRVYEQFLPKAQKLYLTHIDAEVEGDTHFPDYEPDDWESVFSEFHDADAQNSHSYCFEILERR",
            ),
            Protein(
                "recombinase RecA",
                "Escherichia coli",
                "cellular",
                "MAIDENKQKALAAALGQIEKQFGKGSIMRLGEDRSMDVETISTGSLSLDIALGAGGLPMGRIVEIYGPESSGKTTLTLQV"
                "IAAAQREGKTCAFIDAEHALDPIYARKLGVDIDNLLCSQPDTGEQALEICDALARSGAVDVIVVDSVAALTPKAEIEGEI"
                "GDSHMGLAARMMSQAMRKLAGNLKQSNTLLIFINQIRMKIGVMFGNPETTTGGNALKFYASVRLDIRRIGAVKEGENVVG"
                "SETRVKVVKNKIAAPFKQAEFQILYGEGINFYGELVDLGVKEKLIEKAGAWYSYKGEKIGQGKANATAWLKDNPETAKEI"
                "EKKVRELLLSNPNSTPDFSVDDSEGVAETNEDF",
            ),
            Protein(
                "elongation factor Tu",
                "Escherichia coli",
                "cellular",
                "MSKEKFERTKPHVNVGTIGHVDHGKTTLTAAITTVLAKTYGGAARAFDQIDNAPEEKARGITINTSHVEYDTPTRHYAHV"
                "DCPGHADYVKNMITGAAQMDGAILVVAATDGPMPQTREHILLGRQVGVPYIIVFLNKCDMVDDEELLELVEMEVRELLSQ"
                "YDFPGDDTPIVRGSALKALEGDAEWEAKILELAGFLDSYIPEPERAIDKPFLLPIEDVFSISGRGTVVTGRVERGIIKVG"
                "EEVEIVGIKETQKSTCTGVEMFRKLLDEGRAGENVGVLLRGIKREEIERGQVLAKPGTIKPHTKFESEVYILSKDEGGRH"
                "TPFFKGYRPQFYFRTTDVTGTIELPEGVEMVMPGDNIKMVVTLIHPIAMDDGLRFAIREGGRTVGAGVVAKVLG",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "coat protein",
                "phage MS2",
                "viral",
                "MASNFTQFVLVDNGGTGDVTVAPSNFANGVAEWISSNSRSQAYKVTCSVRQSSAQNRKYTIKVEVPKVATQTVGGVELPV"
                "AAWRSYLNMELTIPIFATNSDCELIVKAMQGLLKDGNPIPSAIAANSGIY",
            ),
            Protein(
                "lysis protein",
                "phage MS2",
                "viral",
                "METRFPQQSQQTPASTNRRRPFKHEDYPCRRQQRSSTLYVLIFLAIFLSKFTNQLLLSLLEAVIRTVTTLQQLLT",
            ),
            Protein(
                "replicase",
                "phage MS2",
                "viral",
                "MSKTTKKFNSLCIDLPRDLSLEIYQSIASVATGSGDPHSDDFTAIAYLRDELLTKHPTLGSGNDEATRRTLAIAKLREAN"
                "GDRGQINREGFLHDKSLSWDPDVLQTSIRSLIGNLLSGYRSSLFGQCTFSNGASMGHKLQDAAPYKKFAEQATVTPRALR"
                "AALLVRDQCAPWIRHAVRYNESYEFRLVVGNGVFTVPKNNKIDRAACKEPDMNMYLQKGVGAFIRRRLKSVGIDLNDQSI"
                "NQRLAQQGSVDGSLATIDLSSASDSISDRLVWSFLPPELYSYLDRIRSHYGIVDGETIRWELFSTMGNGFTFELESMIFW"
                "AIVKATQIHFGNAGTIGIYGDDIICPSEIAPRVLEALAYYGFKPNLRKTFVSGLFRESCGAHFYRGVDVKPFYIKKPVDN"
                "LFALMLILNRLRGWGVVGGMSDPRLYKVWVRLSSQVPSMFFGGTDLAADYYVVSPPTAVSVYTKTPYGRLLADTRTSGFR"
                "LARIARERKFFSEKHDSGRYIAWFHTGGEITDSMKSAGVRVIRTSEWLTPVPTFPQECGPASSPR",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "antitermination protein N",
                "phage lambda",
                "viral",
                "MDAQTRRRERRAEKQAQWKAANPLLVGVSAKPVNRPILSLNRKPKSRVESALNPIDLTVLAEYHKQIESNLQRIERKNQR"
                "TWYSKPGERGITCSGRQKIKGKSIPLI",
            ),
            Protein(
                "repressor cI",
                "phage lambda",
                "viral",
                "MSTKKKPLTQEQLEDARRLKAIYEKKKNELGLSQESVADKMGMGQSGVGALFNGINALNAYNAALLAKILKVSVEEFSPS"
                "IAREIYEMYEAVSMQPSLRSEYEYPVFSHVQAGMFSPELRTFTKGDAERWVSTTKKASDSAFWLEVEGNSMTAPTGSKPS"
                "FPDGMLILVDPEQAVEPGDFCIARLGGDEFTFKKLIRDSGQVFLQPLNPQYPMIPCNESCSVVGKVIASQWPEETFG",
            ),
            Protein(
                "regulatory protein Cro",
                "phage lambda",
                "viral",
                "MEQRITLKDYAMRFGQTKTAKDLGVYQSAINKAIHAGRKIFLTINADGSVYAEEVKPFPSNKKTTA",
            ),
            Protein(
                "integrase",
                "phage lambda",
                "viral",
                "MGRRRSHERRDLPPNLYIRNNGYYCYRDPRTGKEFGLGRDRRIAITEAIQANIELFSGHKHKPLTARINSDNSVTLHSWL"
                "DRYEKILASRGIKQKTLINYMSKIKAIRRGLPDAPLEDITTKEIAAMLNGYIDEGKAASAKLIRSTLSDAFREAIAEGHI"
                "TTNHVAATRAAKSEVRRSRLTADEYLKIYQAAESSPCWLRLAMELAVVTGQRVGDLCEMKWSDIVDGYLYVEQSKTGVKI"
                "AIPTALHIDALGISMKETLDKCKEILGGETIIASTRREPLSSGTVSRYFMRARKASGLSFEGDPPTFHELRSLSARLYEK"
                "QISDKFAQHLLGHKSDTMASQYRDDRGREWDKIEIK",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "histone H3.1",
                "Homo sapiens",
                "cellular",
                "MARTKQTARKSTGGKAPRKQLATKAARKSAPATGGVKKPHRYRPGTVALREIRRYQKSTELLIRKLPFQRLVREIAQDFK"
                "TDLRFQSSAVMALQEACEAYLVGLFEDTNLCAIHAKRVTIMPKDIQLARRIRGERA",
            ),
            Protein(
                "histone H4",
                "Homo sapiens",
                "cellular",
                "MSGRGKGGKGLGKGGAKRHRKVLRDNIQGITKPAIRRLARRGGVKRISGLIYEETRGVLKVFLENVIRDAVTYTEHAKRK"
                "TVTAMDVVYALKRQGRTLYGFGG",
            ),
            Protein(
                "histone H2A type 1",
                "Homo sapiens",
                "cellular",
                "MSGRGKQGGKARAKAKTRSSRAGLQFPVGRVHRLLRKGNYAERVGAGAPVYLAAVLEYLTAEILELAGNAARDNKKTRII"
                "PRHLQLAIRNDEELNKLLGKVTIAQGGVLPNIQAVLLPKKTESHHKAKGK",
            ),
            Protein(
                "histone H2B type 1-C",
                "Homo sapiens",
                "cellular",
                "MPEPAKSAPAPKKGSKKAVTKAQKKDGKKRKRSRKESYSVYVYKVLKQVHPDTGISSKAMGIMNSFVNDIFERIAGEASR"
                "LAHYNKRSTITSREIQTAVRLLLPGELAKHAVSEGTKAVTKYTSSK",
            ),
            Protein(
                "tumour suppressor p53",
                "Homo sapiens",
                "cellular",
                "MEEPQSDPSVEPPLSQETFSDLWKLLPENNVLSPLPSQAMDDLMLSPDDIEQWFTEDPGPDEAPRMPEAAPPVAPAPAAP"
                "TPAAPAPAPSWPLSSSVPSQKTYQGSYGFRLGFLHSGTAKSVTCTYSPALNKMFCQLAKTCPVQLWVDSTPPPGTRVRAM"
                "AIYKQSQHMTEVVRRCPHHERCSDSDGLAPPQHLIRVEGNLRVEYLDDRNTFRHSVVVPYEPPEVGSDCTTIHYNYMCNS"
                "SCMGGMNRRPILTIITLEDSSGNLLGRNSFEVRVCACPGRDRRTEEENLRKKGEPHHELPPGSTKRALPNNTSSSPQPKK"
                "KPLDGEYFTLQIRGRERFEMFRELNEALELKDAQAGKEPGGSRAHSSHLKSKKGQSTSRHKKLMFKTEGPDSD",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "Gag polyprotein with capsid p24",
                "HIV-1",
                "viral",
                "MGARASVLSGGELDRWEKIRLRPGGKKKYKLKHIVWASRELERFAVNPGLLETSEGCRQILGQLQPSLQTGSEELRSLYN"
                "TVATLYCVHQRIEIKDTKEALDKIEEEQNKSKKKAQQAAADTGHSNQVSQNYPIVQNIQGQMVHQAISPRTLNAWVKVVE"
                "EKAFSPEVIPMFSALSEGATPQDLNTMLNTVGGHQAAMQMLKETINEEAAEWDRVHPVHAGPIAPGQMREPRGSDIAGTT"
                "STLQEQIGWMTNNPPIPVGEIYKRWIILGLNKIVRMYSPTSILDIRQGPKEPFRDYVDRFYKTLRAEQASQEVKNWMTET"
                "LLVQNANPDCKTILKALGPAATLEEMMTACQGVGGPGHKARVLAEAMSQVTNSATIMMQRGNFRNQRKIVKCFNCGKEGH"
                "TARNCRAPRKKGCWKCGKEGHQMKDCTERQANFLGKIWPSYKGRPGNFLQSRPEPTAPPEESFRSGVETTTPPQKQEPID"
                "KELYPLTSLRSLFGNDPSSQ",
            ),
            Protein(
                "mature protease",
                "HIV-1",
                "viral",
                "PQVTLWQRPLVTIKIGGQLKEALLDTGADDTVLEEMSLPGRWKPKMIGGIGGFIKVRQYDQILIEICGHKAIGTVLVGPT"
                "PVNIIGRNLLTQIGCTLNF",
            ),
            Protein(
                "Tat",
                "HIV-1",
                "viral",
                "MEPVDPRLEPWKHPGSQPKTACTNCYCKKCCFHCQVCFITKALGISYGRKKRRQRRRPPQGSQTHQVSLSKQPTSQSRGD"
                "PTGPKE",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "lysozyme C",
                "Gallus gallus",
                "cellular",
                "MRSLLILVLCFLPLAALGKVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRW"
                "WCNDGRTPGSRNLCNIPCSALLSSDITASVNCAKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL",
            ),
            Protein(
                "ovalbumin",
                "Gallus gallus",
                "cellular",
                "MGSIGAASMEFCFDVFKELKVHHANENIFYCPIAIMSALAMVYLGAKDSTRTQINKVVRFDKLPGFGDSIEAQCGTSVNV"
                "HSSLRDILNQITKPNDVYSFSLASRLYAEERYPILPEYLQCVKELYRGGLEPINFQTAADQARELINSWVESQTNGIIRN"
                "VLQPSSVDSQTAMVLVNAIVFKGLWEKAFKDEDTQAMPFRVTEQESKPVQMMYQIGLFRVASMASEKMKILELPFASGTM"
                "SMLVLLPDEVSGLEQLESIINFEKLTEWTSSNVMEERKIKVYLPRMKMEEKYNLTSVLMAMGITDVFSSSANLSGISSAE"
                "SLKISQAVHAAHAEINEAGREVVGSAEAGVDAASVSEEFRADHPFLFCIKHIATNAVLFFGRCVSP",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "pancreatic trypsin inhibitor precursor",
                "Bos taurus",
                "cellular",
                "MKMSRLCLSVALLVLLGTLAASTPGCDTSNQAKAQRPDFCLEPPYTGPCKARIIRYFYNAKAGLCQTFVYGGCRAKRNNF"
                "KSAEDCMRTCGGAIGPWENL",
            ),
            Protein(
                "ribonuclease A precursor",
                "Bos taurus",
                "cellular",
                "MALKSLVLLSLLVLVLLLVRVQPSLGKETAAAKFERQHMDSSTSAASSSNYCNQMMKSRNLTKDRCKPVNTFVHESLADV"
                "QAVCSQKNVACKNGQTNCYQSYSTMSITDCRETGSSKYPNCAYKTTQANKHIIVACEGNPYVPVHFDASV",
            ),
            Protein(
                "rhodopsin",
                "Bos taurus",
                "cellular",
                "MNGTEGPNFYVPFSNKTGVVRSPFEAPQYYLAEPWQFSMLAAYMFLLIMLGFPINFLTLYVTVQHKKLRTPLNYILLNLA"
                "VADLFMVFGGFTTTLYTSLHGYFVFGPTGCNLEGFFATLGGEIALWSLVVLAIERYVVVCKPMSNFRFGENHAIMGVAFT"
                "WVMALACAAPPLVGWSRYIPEGMQCSCGIDYYTPHEETNNESFVIYMFVVHFIIPLIVIFFCYGQLVFTVKEAAAQQQES"
                "ATTQKAEKEVTRMVIIMVIAFLICWLPYAGVAFYIFTHQGSDFGPIFMTIPAFFAKTSAVYNPVIYIMMNKQFRNCMVTT"
                "LCCGKNPLGDDEASTTVSKTETSQVAPA",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "membrane protein M",
                "SARS-CoV-2",
                "viral",
                "MADSNGTITVEELKKLLEQWNLVIGFLFLTWICLLQFAYANRNRFLYIIKLIFLWLLWPVTLACFVLAAVYRINWITGGI"
                "AIAMACLVGLMWLSYFIASFRLFARTRSMWSFNPETNILLNVPLHGTILTRPLLESELVIGAVILRGHLRIAGHHLGRCD"
                "IKDLPKEITVATSRTLSYYKLGASQRVAGDSGFAAYSRYRIGNYKLNTDHSSSSDNIALLVQ",
            ),
            Protein(
                "envelope protein E",
                "SARS-CoV-2",
                "viral",
                "MYSFVSEETGTLIVNSVLLFLAFVVFLLVTLAILTALRLCAYCCNIVNVSLVKPSFYVYSRVKNLNSSRVPDLLV",
            ),
            Protein(
                "nucleocapsid protein N",
                "SARS-CoV-2",
                "viral",
                "MSDNGPQNQRNAPRITFGGPSDSTGSNQNGERSGARSKQRRPQGLPNNTASWFTALTQHGKEDLKFPRGQGVPINTNSSP"
                "DDQIGYYRRATRRIRGGDGKMKDLSPRWYFYYLGTGPEAGLPYGANKDGIIWVATEGALNTPKDHIGTRNPANNAAIVLQ"
                "LPQGTTLPKGFYAEGSRGGSQASSRSSSRSRNSSRNSTPGSSRGTSPARMAGNGGDAALALLLLDRLNQLESKMSGKGQQ"
                "QQGQTVTKKSAAEASKKPRQKRTATKAYNVTQAFGRRGPEQTQGNFGDQELIRQGTDYKHWPQIAQFAPSASAFFGMSRI"
                "GMEVTPSGTWLTYTGAIKLDDKDPNFKDQVILLNKHIDAYKTFPPTEPKKDKKKKADETQALPQRQKKQQTVTLLPAADL"
                "DDFSKQLQQSMSSADSTQA",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "matrix protein M1",
                "influenza A virus",
                "viral",
                "MSLLTEVETYVLSIVPSGPLKAEIAQRLEDVFAGKNTDLEVLMEWLKTRPILSPLTKGILGFVFTLTVPSERGLQRRRFV"
                "QNALNGNGDPNNMDKAVKLYRKLKREITFHGAKEISLSYSAGALASCMGLIYNRMGAVTTEVAFGLVCATCEQIADSQHR"
                "SHRQMVTTTNPLIRHENRMVLASTTAKAMEQMAGSSEQAAEAMEVASQARQMVQAMRTIGTHPSSSAGLKNDLLENLQAY"
                "QKRMGVQMQRFK",
            ),
            Protein(
                "proton channel M2",
                "influenza A virus",
                "viral",
                "MSLLTEVETPIRNEWGCRCNGSSDPLAIAANIIGILHLTLWILDRLFFKCIYRRFKYGLKGGPSTEGVPKSMREEYRKEQ"
                "QSAVDADDGHFVSIELE",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "actin beta",
                "Homo sapiens",
                "cellular",
                "MDDDIAALVVDNGSGMCKAGFAGDDAPRAVFPSIVGRPRHQGVMVGMGQKDSYVGDEAQSKRGILTLKYPIEHGIVTNWD"
                "DMEKIWHHTFYNELRVAPEEHPVLLTEAPLNPKANREKMTQIMFETFNTPAMYVAIQAVLSLYASGRTTGIVMDSGDGVT"
                "HTVPIYEGYALPHAILRLDLAGRDLTDYLMKILTERGYSFTTTAEREIVRDIKEKLCYVALDFEQEMATAASSSSLEKSY"
                "ELPDGQVITIGNERFRCPEALFQPSFLGMESCGIHETTFNSIMKCDVDIRKDLYANTVLSGGTTMYPGIADRMQKEITAL"
                "APSTMKIKIIAPPERKYSVWIGGSILASLSTFQQMWISKQEYDESGPSIVHRKCF",
            ),
            Protein(
                "calmodulin",
                "Homo sapiens",
                "cellular",
                "MADQLTEEQIAEFKEAFSLFDKDGDGTITTKELGTVMRSLGQNPTEAELQDMINEVDADGNGTIDFPEFLTMMARKMKDT"
                "DSEEEIREAFRVFDKDGNGYISAAELRHVMTNLGEKLTDEEVDEMIREADIDGDGQVNYEEFVQMMTAK",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "DNA-binding protein J",
                "phage phiX174",
                "viral",
                "MSKGKKRSGARPGRPQPLRGTKGKRKGARLWYVGGQQF",
            ),
            Protein(
                "capsid protein F",
                "phage phiX174",
                "viral",
                "MSNIQTGAERMPHDLSHLGFLAGQIGRLITISTTPVIAGDSFEMDAVGALRLSPLRRGLAIDSTVDIFTFYVPHRHVYGE"
                "QWIKFMKDGVNATPLPTVNTTGYIDHAAFLGTINPDTNKIPKHLFQGYLNIYNNYFKAPWMPDRTEANPNELNQDDARYG"
                "FRCCHLKNIWTAPLPPETELSRQMTTSTTSIDIMGLQAAYANLHTDQERDYFMQRYRDVISSFGGKTSYDADNRPLLVMR"
                "SNLWASGYDVDGTDQTSLGQFSGRVQQTYKHSVPRFFVPEHGTMFTLALVRFPPTATKEIQYLNAKGALTYTDIAGDPVL"
                "YGNLPPREISMKDVFRSGDSSKKFKIAEGQWYRYAPSYVSPAYHLLEGFPFIQEPPSGDLQERVLIRHHDYDQCFQSVQL"
                "LQWNSQVKFNVTVYRNLPTTRDSIMTS",
            ),
            Protein(
                "spike protein G",
                "phage phiX174",
                "viral",
                "MFQTFISRHNSNFFSDKLVLTSVTPASSAPVLQTPKATSSTLYFDSLTVNAGNGGFLHCIQMDTSVNAANQVVSVGADIA"
                "FDADPKFFACLVRFESSSVPTTLPTAYDVYPLNGRHDGGYYTVKDCVTIDVLPRTPGNNVYVGFMVWSNFTATKCRGLVS"
                "LNQVIKEIICLQPLK",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "lysozyme",
                "phage T4",
                "viral",
                "MNIFEMLRIDEGLRLKIYKDTEGYYTIGIGHLLTKSPSLNAAKSELDKAIGRNCNGVITKDEAEKLFNQDVDAAVRGILR"
                "NAKLKPVYDSLDAVRRCALINMVFQMGETGVAGFTNSLRMLQQKRWDEAAVNLAKSRWYNQTPNRAKRVITTFRTGTWDA"
                "YKNL",
            ),
            Protein(
                "single-strand binding protein gp32",
                "phage T4",
                "viral",
                "MFKRKSTAELAAQMAKLNGNKGFSSEDKGEWKLKLDNAGNGQAVIRFLPSKNDEQAPFAILVNHGFKKNGKWYIETCSST"
                "HGDYDSCPVCQYISKNDLYNTDNKEYSLVKRKTSYWANILVVKDPAAPENEGKVFKYRFGKKIWDKINAMIAVDVEMGET"
                "PVDVTCPWEGANFVLKVKQVSGFSNYDESKFLNQSAIPNIDDESFQKELFEQMVDLSEMTSKDKFKSFEELNTKFGQVMG"
                "TAVMGGAAATAAKKADKVADDLDAFNVDDFNTKTEDDFMSSSSGSSSSADDTDLDDLLNDL",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "insulin precursor",
                "Homo sapiens",
                "cellular",
                "MALWMRLLPLLALLALWGPDPAAAFVNQHLCGSHLVEALYLVCGERGFFYTPKTRREAEDLQVGQVELGGGPGAGSLQPL"
                "ALEGSLQKRGIVEQCCTSICSLYQLENYCN",
            ),
            Protein(
                "cytochrome c",
                "Homo sapiens",
                "cellular",
                "MGDVEKGKKIFIMKCSQCHTVEKGGKHKTGPNLHGLFGRKTGQAPGYSYTAANKNKGIIWGEDTLMEYLENPKKYIPGTK"
                "MIFVGIKKKEERADLIAYLKKATNE",
            ),
            Protein(
                "polyubiquitin-B",
                "Homo sapiens",
                "cellular",
                "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGGMQIF"
                "VKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGGMQIFVKTL"
                "TGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGGC",
            ),
            Protein(
                "glyceraldehyde-3-phosphate dehydrogenase",
                "Homo sapiens",
                "cellular",
                "MGKVKVGVNGFGRIGRLVTRAAFNSGKVDIVAINDPFIDLNYMVYMFQYDSTHGKFHGTVKAENGKLVINGNPITIFQER"
                "DPSKIKWGDAGAEYVVESTGVFTTMEKAGAHLQGGAKRVIISAPSADAPMFVMGVNHEKYDNSLKIISNASCTTNCLAPL"
                "AKVIHDNFGIVEGLMTTVHAITATQKTVDGPSGKLWRDGRGALQNIIPASTGAAKAVGKVIPELNGKLTGMAFRVPTANV"
                "SVVDLTCRLEKPAKYDDIKKVVKQASEGPLKGILGYTEHQVVSSDFNSDTHSSTFDAGAGIALNDHFVKLISWYDNEFGY"
                "SNRVVDLMAHMASKE",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "RNA polymerase",
                "phage T7",
                "viral",
                "MNTINIAKNDFSDIELAAIPFNTLADHYGERLAREQLALEHESYEMGEARFRKMFERQLKAGEVADNAAAKPLITTLLPK"
                "MIARINDWFEEVKAKRGKRPTAFQFLQEIKPEAVAYITIKTTLACLTSADNTTVQAVASAIGRAIEDEARFGRIRDLEAK"
                "HFKKNVEEQLNKRVGHVYKKAFMQVVEADMLSKGLLGGEAWSSWHKEDSIHVGVRCIEMLIESTGMVSLHRQNAGVVGQD"
                "SETIELAPEYAEAIATRAGALAGISPMFQPCVVPPKPWTGITGGGYWANGRRPLALVRTHSKKALMRYEDVYMPEVYKAI"
                "NIAQNTAWKINKKVLAVANVITKWKHCPVEDIPAIEREELPMKPEDIDMNPEALTAWKRAAAAVYRKDKARKSRRISLEF"
                "MLEQANKFANHKAIWFPYNMDWRGRVYAVSMFNPQGNDMTKGLLTLAKGKPIGKEGYYWLKIHGANCAGVDKVPFPERIK"
                "FIEENHENIMACAKSPLENTWWAEQDSPFCFLAFCFEYAGVQHHGLSYNCSLPLAFDGSCSGIQHFSAMLRDEVGGRAVN"
                "LLPSETVQDIYGIVAKKVNEILQADAINGTDNEVVTVTDENTGEISEKVKLGTKALAGQWLAYGVTRSVTKRSVMTLAYG"
                "SKEFGFRQQVLEDTIQPAIDSGKGLMFTQPNQAAGYMAKLIWESVSVTVVAAVEAMNWLKSAAKLLAAEVKDKKTGEILR"
                "KRCAVHWVTPDGFPVWQEYKKPIQTRLNLMFLGQFRLQPTINTNKDSEIDAHKQESGIAPNFVHSQDGSHLRKTVVWAHE"
                "KYGIESFALIHDSFGTIPADAANLFKAVRETMVDTYESCDVLADFYDQFADQLHESQLDKMPALPAKGNLNLRDILESDF"
                "AFA",
            ),
            Protein(
                "lysozyme",
                "phage T7",
                "viral",
                "MARVQFKQRESTDAIFVHCSATKPSQNVGVREIRQWHKEQGWLDVGYHFIIKRDGTVEAGRDEMAVGSHAKGYNHNSIGV"
                "CLVGGIDDKGKFDANFTPAQMQSLRSLLVTLLAKYEGAVLRAHHEVAPKACPSFDLKRWWEKNELVTSDRG",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "luciferase",
                "Photinus pyralis",
                "cellular",
                "MEDAKNIKKGPAPFYPLEDGTAGEQLHKAMKRYALVPGTIAFTDAHIEVNITYAEYFEMSVRLAEAMKRYGLNTNHRIVV"
                "CSENSLQFFMPVLGALFIGVAVAPANDIYNERELLNSMNISQPTVVFVSKKGLQKILNVQKKLPIIQKIIIMDSKTDYQG"
                "FQSMYTFVTSHLPPGFNEYDFVPESFDRDKTIALIMNSSGSTGLPKGVALPHRTACVRFSHARDPIFGNQIIPDTAILSV"
                "VPFHHGFGMFTTLGYLICGFRVVLMYRFEEELFLRSLQDYKIQSALLVPTLFSFFAKSTLIDKYDLSNLHEIASGGAPLS"
                "KEVGEAVAKRFHLPGIRQGYGLTETTSAILITPEGDDKPGAVGKVVPFFEAKVVDLDTGKTLGVNQRGELCVRGPMIMSG"
                "YVNNPEATNALIDKDGWLHSGDIAYWDEDEHFFIVDRLKSLIKYKGYQVAPAELESILLQHPNIFDAGVAGLPDDDAGEL"
                "PAAVVVLEHGKTMTEKEIVDYVASQVTTAKKLRGGVVFVDEVPKGLTGKLDARKIREILIKAKKGGKSKL",
            ),
        ),
    ),
    Contig(
        reverse=True,
        proteins=(
            Protein(
                "DNA-binding protein gp5",
                "phage M13",
                "viral",
                "MIKVEIKPSQAQFTTRSGVSRQGKPYSLNEQLCYVDLGNEYPVLVKITLDEGQPAYAPGLYTVHLSSFKVGQFGSLMIDR"
                "LRLVPAK",
            ),
            Protein(
                "major coat protein gp8",
                "phage M13",
                "viral",
                "MKKSLVLKASVAVATLVPMLSFAAEGDDPAKAAFNSLQASATEYIGYAWAMVVVIVGATIGIKLFKKFTSKAS",
            ),
            Protein(
                "attachment protein gp3",
                "phage M13",
                "viral",
                "MKKLLFAIPLVVPFYSHSAETVESCLAKPHTENSFTNVWKDDKTLDRYANYEGCLWNATGVVVCTGDETQCYGTWVPIGL"
                "AIPENEGGGSEGGGSEGGGSEGGGTKPPEYGDTPIPGYTYINPLDGTYPPGTEQNPANPNPSLEESQPLNTFMFQNNRFR"
                "NRQGALTVYTGTVTQGTDPVKTYYQYTPVSSKAMYDAYWNGKFRDCAFHSGFNEDPFVCEYQGQSSDLPQPPVNAGGGSG"
                "GGSGGGSEGGGSEGGGSEGGGSEGGGSGGGSGSGDFDYEKMANANKGAMTENADENALQSDAKGKLDSVATDYGAAIDGF"
                "IGDVSGLANGNGATGDFAGSNSQMAQVGDGDNSPLMNNFRQYLPSLPQSVECRPFVFGAGKPYEFSIDCDKINLFRGVFA"
                "FLLYVATFMYVFSTFANILRNKES",
            ),
        ),
    ),
    Contig(
        reverse=False,
        proteins=(
            Protein(
                "lac repressor LacI",
                "Escherichia coli",
                "cellular",
                "MKPVTLYDVAEYAGVSYQTVSRVVNQASHVSAKTREKVEAAMAELNYIPNRVAQQLAGKQSLLIGVATSSLALHAPSQIV"
                "AAIKSRADQLGASVVVSMVERSGVEACKAAVHNLLAQRVSGLIINYPLDDQDAIAVEAACTNVPALFLDVSDQTPINSII"
                "FSHEDGTRLGVEHLVALGHQQIALLAGPLSSVSARLRLAGWHKYLTRNQIQPIAEREGDWSAMSGFQQTMQMLNEGIVPT"
                "AMLVANDQMALGAMRAITESGLRVGADISVVGYDDTEDSSCYIPPLTTIKQDFRLLGQTSVDRLLQLSQGQAVKGNQLLP"
                "VSLVKRKTTLAPNTQTASPRALADSLMQLARQVSRLESGQ",
            ),
            Protein(
                "beta-lactamase TEM-1 of a plasmid",
                "Escherichia coli",
                "cellular",
                "MSIQHFRVALIPFFAAFCLPVFAHPETLVKVKDAEDQLGARVGYIELDLNSGKILESFRPEERFPMMSTFKVLLCGAVLS"
                "RVDAGQEQLGRRIHYSQNDLVEYSPVTEKHLTDGMTVRELCSAAITMSDNTAANLLLTTIGGPKELTAFLHNMGDHVTRL"
                "DRWEPELNEAIPNDERDTTMPAAMATTLRKLLTGELLTLASRQQLIDWMEADKVAGPLLRSALPAGWFIADKSGAGERGS"
                "RGIIAALGPDGKPSRIVVIYTTGSQATMDERNRQIAEIGASLIKHW",
            ),
        ),
    ),
)


def weighted_codons(usage: str) -> dict[str, tuple[list[str], list[float]]]:
    """Synonymous codons of each residue, with their weights; ``*`` stands for the stops."""
    table: dict[str, tuple[list[str], list[float]]] = {}
    weights = map(float, CODON_USAGE[usage].split())
    for codon, residue, weight in zip(
        product("TCAG", repeat=3), GENETIC_CODE, weights, strict=True
    ):
        synonyms, known = table.setdefault(residue, ([], []))
        synonyms.append("".join(codon))
        known.append(weight)
    return table


def back_translate(sequence: str, usage: str, rng: Random) -> str:
    """Draw a codon for each residue, then a stop codon."""
    table = weighted_codons(usage)
    return "".join([rng.choices(*table[residue])[0] for residue in sequence + "*"])


def draw_spacer(rng: Random) -> str:
    n_bases = rng.choices(range(SPACER_BASES[0], SPACER_BASES[1] + 1))[0]
    return "".join(rng.choices("ACGT", k=n_bases))


def reverse_complement(bases: str) -> str:
    return bases.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def contig_bases(contig: Contig, rng: Random) -> str:
    """Spacer, gene, spacer, gene, ..., spacer; the whole reversed if the contig says so."""
    parts = [draw_spacer(rng)]
    for protein in contig.proteins:
        parts += [back_translate(protein.sequence, contig.codon_usage, rng), draw_spacer(rng)]
    bases = "".join(parts)
    return reverse_complement(bases) if contig.reverse else bases


def fasta_lines(contigs: tuple[Contig, ...]) -> Iterator[str]:
    """The lines of the FASTA file, without line ends; ids are numbered within each kind."""
    n_seen: Counter[str] = Counter()
    for contig in contigs:
        n_seen[contig.kind] += 1
        contig_id = f"{ID_PREFIX[contig.kind]}_{n_seen[contig.kind]:02d}"
        yield f">{contig_id} {contig.description}"
        # seeded by the id, so that a new contig at the end leaves the others as they are
        bases = contig_bases(contig, Random(contig_id))
        for start in range(0, len(bases), LINE_BASES):
            yield bases[start : start + LINE_BASES]


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        sys.exit("usage: python make_contigs.py [PATH]")
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("contigs.fa")
    text = "".join(f"{line}\n" for line in fasta_lines(CONTIGS))
    path.write_text(text, encoding="ascii", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
