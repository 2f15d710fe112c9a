"""Write the example contigs: known proteins, back-translated into synthetic DNA.

Each contig holds the proteins of one organism, in order, with short random spacers before,
between and after them; about half of the contigs lie on the reverse strand. Viral contigs
stand among cellular ones, and the ids say which is which. The same bytes come out of every
run, and a contig's bases depend on its own id and proteins alone.

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
from math import prod
from pathlib import Path
from random import Random
from typing import Literal

LINE_BASES = 60
SPACER_BASES = (15, 60)  # shortest and longest
GC_RANGE = (0.36, 0.58)  # one GC content is drawn per contig
ID_PREFIX = {"viral": "example_virus", "cellular": "example_host"}

# the standard genetic code, codons in the order of product("TCAG", repeat=3)
GENETIC_CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"


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
        reverse=False,
        proteins=(
            Protein(
                "green fluorescent protein",
                "Aequorea victoria",
                "cellular",
                "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTLVTTFSYGVQCFSRYPDHMKQ"
                "HDFFKSAMPEGYVQERTIFFKDDGNYKTRAEVKFEGDTLVNRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNG"
                "IKVNFKIRHNIEDGSVQLADHYQQNTPIGDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTAAGITHGMDELYK",
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


def codons_by_residue() -> dict[str, list[str]]:
    """Synonymous codons of each residue; ``*`` stands for the stops."""
    table: dict[str, list[str]] = {}
    for codon, residue in zip(product("TCAG", repeat=3), GENETIC_CODE, strict=True):
        table.setdefault(residue, []).append("".join(codon))
    return table


def back_translate(sequence: str, gc: float, rng: Random) -> str:
    """Draw a codon for each residue, then a stop codon.

    Synonyms are weighted by the chance of their bases at GC content ``gc``.
    """
    table = codons_by_residue()
    codons = []
    for residue in sequence + "*":
        synonyms = table[residue]
        weights = [prod(gc if base in "GC" else 1 - gc for base in codon) for codon in synonyms]
        codons += rng.choices(synonyms, weights)
    return "".join(codons)


def draw_spacer(gc: float, rng: Random) -> str:
    n_bases = rng.choices(range(SPACER_BASES[0], SPACER_BASES[1] + 1))[0]
    return "".join(rng.choices("ACGT", (1 - gc, gc, gc, 1 - gc), k=n_bases))


def reverse_complement(bases: str) -> str:
    return bases.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def contig_bases(contig: Contig, rng: Random) -> str:
    """Spacer, gene, spacer, gene, ..., spacer; the whole reversed if the contig says so."""
    gc = rng.uniform(*GC_RANGE)
    parts = [draw_spacer(gc, rng)]
    for protein in contig.proteins:
        parts += [back_translate(protein.sequence, gc, rng), draw_spacer(gc, rng)]
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
