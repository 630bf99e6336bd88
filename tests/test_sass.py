"""The reader of SASS, on a few lines by hand: a warpgroup's product loop, whose A operand is dequantized each time."""

import pytest
from sass import Control, early_releases, hazards, is_wgmma, parse, register_limits

LOOP = """
        .global         kernel
.text.kernel:
        /*0000*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x68 ;
        /*0010*/                   ISETP.LT.AND P1, PT, R2, R40, PT ;
.L_x_0:
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR4], R24 ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R44, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   LDS.128 R48, [R9+0x10] ;
        /*0050*/              @!P2 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   LOP3.LUT R40, R48, 0x81c081c0, RZ, 0xc0, !PT ;
        /*0080*/               @P1 BRA `(.L_x_0) ;
        /*0090*/                   STG.E desc[UR6][R4.64], R24 ;
        /*00a0*/                   EXIT ;
.L_x_1:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R60+URZ], R61 ;
        /*00c0*/                   BRA `(.L_x_2) ;
"""
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_registers_that_are_free_again_may_be_written():
    program = parse(LOOP)
    assert [instruction.text.split()[1] for instruction in program if is_wgmma(instruction)] == [
        "HGMMA.64x16x16.F32.BF16"
    ] * 2
    assert hazards(program) == []


@pytest.mark.parametrize(
    ("before", "after", "clashes"),
    [
        ("LDS.128 R48, [R9+0x10]", "LDS.128 R44, [R9+0x10]", [("0030", "0040")]),  # next to it
        ("LDS.128 R48, [R9+0x10]", "@P4 IMAD.WIDE.U32 R42, P3, R1, R2, R4", [("0020", "0040")]),  # R43 by R42's side
        ("LDS.128 R48, [R9+0x10]", "CS2R R46, SRZ", [("0030", "0040")]),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R60+URZ], R61", "MOV R47, R61", [("0030", "00b0")]),  # past a branch
        ("LDS.128 R48, [R9+0x10]", "FADD R3, R25, R3", [("0020", "0040"), ("0030", "0040")]),  # half a sum is read
        ("LDS.128 R48, [R9+0x10]", "MOV R31, R3", [("0020", "0040"), ("0030", "0040")]),  # a sum's last is lost
        (WAIT, "NOP", [("0020", "0070"), ("0020", "0090"), ("0030", "0090")]),  # never waited for
        (WAIT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", [("0020", "0070"), ("0020", "0090"), ("0030", "0090")]),
        (", gsb0", "", [("0020", "0070"), ("0020", "0090"), ("0030", "0090")]),  # of no group: no wait reaches it
    ],
)
def test_a_register_in_use_is_reported_on_every_path(before, after, clashes):
    assert LOOP.count(before) == 1
    found = [each.split(" | ") for each in hazards(parse(LOOP.replace(before, after)))]
    assert [(wgmma[:4], other[:4]) for wgmma, other in found] == clashes


def lines(*instructions: str) -> str:
    """Instructions and labels, at addresses that count the lines."""
    return "".join(
        f"{line}\n" if line.startswith((".", "$")) else f"/*{number:04x}*/ {line} ;\n"
        for number, line in enumerate(instructions)
    )


def test_a_loop_is_followed_back_to_its_start():
    wgmma = "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR4], R24, gsb0"
    for first, clashes in (("MOV R43, R2", ["0001"]), ("MOV R44, R2", [])):
        program = parse(lines(".L_x_0:", first, WAIT, wgmma, "@P1 BRA `(.L_x_0)", WAIT, "STG.E [R4], R24", "EXIT"))
        assert [each.split(" | ")[1][:4] for each in hazards(program)] == clashes


def test_threads_that_diverge_meet_again_at_their_barrier():
    wgmma = "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR4], R24, gsb0"
    parted = ["BSSY B0, `(.L_x_1)", "@P1 BRA `(.L_x_0)", "BSYNC B0", "MOV R42, R1", ".L_x_0:", "BSYNC B0", ".L_x_1:"]
    assert hazards(parse(lines(wgmma, *parted, WAIT, "MOV R42, R1", "EXIT"))) == []
    assert len(hazards(parse(lines(wgmma, *parted, "MOV R42, R1", WAIT, "EXIT")))) == 1


def test_a_barrier_leads_where_it_was_last_named():
    """Both arms use one barrier, and neither goes on in the other one; but where either may have been named."""
    arms = [
        (f"BSSY B0, `(.L_x_{n})", "NOP", "BSYNC B0", "EXIT", f".L_x_{n}:", f"MOV R{n}, R1", "EXIT") for n in (20, 90)
    ]
    limits = ("USETMAXREG.ALLOC.CTAPOOL 0x68", "USETMAXREG.DEALLOC.CTAPOOL 0x28")
    text = lines("@P1 BRA `(.L_x_1)", limits[0], *arms[1], ".L_x_1:", limits[1], *arms[0])
    assert register_limits(parse(text)) == [(104, 91), (40, 21)]
    either = text.replace("@P1 BRA", "BSSY B0, `(.L_x_90) ;\n/*00ff*/ @P1 BRA").replace(
        "BSSY B0, `(.L_x_20) ;", "NOP ;"
    )
    assert register_limits(parse(either)) == [(104, 91), (40, 91)]


def test_a_wait_may_let_the_latest_groups_run_on():
    text = lines(
        "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR4], R24, gsb0",
        "HGMMA.64x8x16.F32.BF16 R28, R44, gdesc[UR4], R28, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "MOV R40, R1",
        "MOV R44, R1",
        WAIT,
        "MOV R44, R1",
        "EXIT",
    )
    assert [each.split(" | ")[1] for each in hazards(parse(text))] == ["0004: MOV R44, R1"]


def test_operands_in_shared_memory_hold_no_registers():
    wgmma = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0"
    found = {
        register: hazards(parse(lines(wgmma, f"MOV {register}, R1", "EXIT"))) for register in ("R23", "R87", "R88")
    }
    assert {register for register, clashes in found.items() if clashes} == {"R87"}


def test_registers_are_counted_from_where_their_number_is_set():
    assert register_limits(parse(LOOP)) == [(0x68, 62)]
    handed_back = LOOP.replace("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R60+URZ], R61", "USETMAXREG.DEALLOC.CTAPOOL 0x28")
    assert register_limits(parse(handed_back)) == [(0x68, 52), (0x28, 52)]


def test_a_call_goes_into_its_function_and_on():
    wgmma = "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR4], R24, gsb0"
    call = "CALL.REL.NOINC `($__internal_0_$__div)"
    for inside, behind, clashes in (("R1", "R2", 0), ("R40", "R2", 1), ("R1", "R43", 1)):
        function = ["$__internal_0_$__div:", f"MOV {inside}, R2", "RET.REL.NODEC R28 `(kernel)"]
        text = lines(wgmma, call, f"MOV {behind}, R3", WAIT, "EXIT", *function)
        assert len(hazards(parse(text))) == clashes


def test_a_jump_that_cannot_be_followed_is_refused():
    with pytest.raises(ValueError, match="0001: BRX R4"):
        parse(lines("MOV R1, R2", "BRX R4 -0x40"))


# Loads from shared memory that are followed by an arrival

STAGE = """
.text.kernel:
.L_x_0:
   -:-:1:Y:02        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR21], R18
   1:-:2:Y:01        /*0020*/                   LDS.64 R18, [R12+0x9400]
   -:-:-:Y:04        /*0030*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR32], R24, gsb0
   -:-:-:Y:02        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0
   -:-:3:Y:01        /*0050*/                   LDSM.16.M88.4 R20, [R13+0x9800]
   -:-:-:Y:01        /*0060*/                   NOP
   -:-:-:Y:01        /*0070*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ
   2&3:-:-:Y:01      /*0080*/                   FMUL R23, R18, R20
   -:-:-:Y:06        /*0090*/               @P2 BRA `(.L_x_0)
   -:-:-:Y:05        /*00a0*/                   EXIT
"""


NOP = "-:-:-:Y:01        /*0060*/                   NOP"


@pytest.mark.parametrize(
    ("before", "after", "early"),
    [
        ("", "", ["0020", "0050"]),
        (NOP, "3:-:-:Y:01 /*0060*/ FMUL R23, R18, R20", []),  # in order
        (NOP, "2:-:-:Y:01 /*0060*/ FMUL R23, R18, R18", ["0050"]),
        (NOP, "-:-:-:Y:01 /*0060*/ DEPBAR.LE SB3, 0x0", []),
        (NOP, "-:-:-:Y:01 /*0060*/ DEPBAR.LE SB3, 0x1", ["0020", "0050"]),
        ("-:-:-:Y:01        /*0070*/", "3:-:-:Y:01 /*0070*/", []),  # the arrival itself waits
        ("LDSM.16.M88.4 R20, [R13+0x9800]", "MUFU.EX2 R20, R20", ["0020"]),
        ("3:Y:01        /*0050*/", "-:Y:01 /*0050*/", ["0020", "0050"]),  # nothing says when it is there
    ],
)
def test_a_load_that_an_arrival_may_overtake_is_reported(before, after, early):
    text = STAGE.replace(before, after) if before else STAGE
    assert before == "" or STAGE.count(before) == 1
    found = early_releases(parse(text))
    assert [each.split(" | ")[0][:4] for each in found] == early
    assert all(" | 0070: SYNCS.ARRIVE" in each for each in found)
    assert early_releases(parse(text), "LDSM") == [each for each in found if "LDSM" in each]


def test_a_fence_that_was_waited_for_has_seen_all_loads():
    barrier, fence = "-:4:-:Y:06 /*0061*/ MEMBAR.ALL.CTA\n", "4:-:5:Y:02 /*0062*/ FENCE.VIEW.ASYNC.S"
    for before, waits, early in (
        (barrier + fence, "5", 0),
        (barrier + fence, "-", 0),
        (fence, "5", 0),
        (fence, "-", 2),
    ):
        text = STAGE.replace(NOP, before).replace("-:-:-:Y:01        /*0070*/", f"{waits}:-:-:Y:01 /*0070*/")
        assert len(early_releases(parse(text))) == early


def test_loads_are_followed_past_a_branch():
    past = STAGE.replace("/*0060*/                   NOP", "/*0060*/ @P1 BRA `(.L_x_0)")
    assert [each[:4] for each in early_releases(parse(past))] == ["0020", "0050"]
    gone = past.replace("@P1 BRA `(.L_x_0)", "EXIT")
    assert early_releases(parse(gone)) == []


def test_control_bits_are_read_from_words_too():
    text = """
        /*12d0*/                   LDS.128 R4, [R4] ;                              /* 0x0000000004047984 */
                                                                                   /* 0x000e240000000c00 */
        /*2860*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R9+URZ+0x18], RZ ; /* 0x000018ff09ff89a7 */
                                                                                   /* 0x0005e6000810003f */
        /*28a0*/                   FADD R27, R33, R26 ;                            /* 0x0000001a211b7221 */
                                                                                   /* 0x002fe20000000000 */
"""
    load, arrival, use = parse(text)
    assert load.control == Control(frozenset(), None, 0)
    assert arrival.control == Control(frozenset(), 2, None)
    assert use.control == Control(frozenset({1}), None, None)
    assert len(early_releases([load, arrival, use])) == 1


def test_without_control_bits_nothing_is_known():
    with pytest.raises(ValueError, match=r"0000: LDS R1.*control bits"):
        early_releases(parse(lines("LDS R1, [R2]", "EXIT")))
