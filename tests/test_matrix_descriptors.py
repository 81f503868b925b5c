"""stray_descriptors finds the products that read a matrix which is not where the program has it."""

from __future__ import annotations

from tests.support.machine_code.matrix_descriptors import stray_descriptors

ADDRESS = """
 /*0010*/                   S2UR UR4, SR_CgaCtaId ;
 /*0020*/                   UMOV UR24, 0x400 ;
 /*0030*/                   ULEA UR24, UR4, UR24, 0x18 ;
 /*0040*/                   USHF.R.U32.HI UR6, URZ, 0x4, UR24 ;
 /*0050*/                   UMOV UR7, 0x40000040 ;
"""
PRODUCT = " /*0100*/  HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56 ;\n"


def test_an_address_of_shared_memory_is_right() -> None:
    assert stray_descriptors(ADDRESS + PRODUCT) == []
    both = " /*0060*/ UMOV UR4, UR6 ;\n" + PRODUCT.replace("R24, ", "")
    assert stray_descriptors(ADDRESS + both) == []


def test_a_register_that_nothing_has_written_is_stray() -> None:
    lost = " /*0060*/ UIADD3 UR38, UP1, UR38, 0x20, URZ ;\n" + PRODUCT.replace("UR4", "UR36")
    [found] = stray_descriptors(ADDRESS + lost)
    assert found == "0100: R56, R24, gdesc[UR36].tnspB, R56"


def test_a_register_with_an_argument_is_stray_although_it_had_an_address() -> None:
    argument = " /*0060*/ ULDC UR6, c[0x0][0x228] ;\n /*0070*/ UIADD3 UR6, UR6, 0x2, URZ ;\n"
    assert len(stray_descriptors(ADDRESS + argument + PRODUCT)) == 1
    offset = argument.replace("UR6, UR6, 0x2", "UR6, UR6, UR24")
    assert stray_descriptors(ADDRESS + offset + PRODUCT) == []


def test_an_address_that_a_later_instruction_computes_in_a_loop_is_right() -> None:
    loop = " /*0110*/ UIADD3 UR38, UR6, 0x20, URZ ;\n"
    assert stray_descriptors(ADDRESS + PRODUCT.replace("UR4", "UR36") + loop) == []
