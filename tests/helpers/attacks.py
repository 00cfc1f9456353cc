"""Six kinds of hostile text around markers of two scopes, one of which reads it."""

from hypothesis import strategies as st

from ctx_compress_rag.store.marker import MarkerCodec

KEY, FINGERPRINT = b"k" * 32, "f" * 64
CODEC = MarkerCodec(KEY, FINGERPRINT)
SCOPES = ("anna", "ben")
PASSAGES = [CODEC.passage(f"passage {number}") for number in range(4)]
ISSUED = {
    who: [CODEC.write(name, factor, slots, who) for name in PASSAGES for factor, slots in ((1, 24), (4, 6))]
    + [CODEC.write(CODEC.transient("a question", name), 1, slots, who) for name in PASSAGES for slots in (0, 3)]
    for who in SCOPES
}
OTHERS = [
    codec.write(codec.passage("passage 0"), 1, 24, who)
    for codec in (MarkerCodec(b"x" * 32, FINGERPRINT), MarkerCodec(b"K" * 32, FINGERPRINT))
    for who in SCOPES
]

own = st.sampled_from(ISSUED["anna"])
foreign = st.sampled_from(ISSUED["ben"] + OTHERS)
issued = own | foreign
letters = st.text("abcdefghijklmnop", min_size=16, max_size=20)
noise = st.text("[]ctx:.abp0169 \n{}<|>$%\\\"'", max_size=12) | st.text(max_size=8)


@st.composite
def forged(draw: st.DrawFn) -> str:
    head, tag = draw(letters), draw(letters)
    return f"[[ctx:{head}.{draw(st.integers(0, 10**8) | st.sampled_from(['', '-1', '٣', '1e3', '007']))}.{tag}]]"


@st.composite
def replayed(draw: st.DrawFn) -> str:
    return draw(noise) + draw(foreign) * draw(st.integers(1, 3)) + draw(noise)


@st.composite
def tampered(draw: st.DrawFn) -> str:
    marker = draw(issued)
    at = draw(st.integers(0, len(marker) - 1))
    changed = draw(st.sampled_from("abcdefghijklmnop0123456789.:[] ") | st.characters())
    return draw(
        st.sampled_from(
            [
                marker[:at] + changed + marker[at + 1 :],
                marker[:at] + changed + marker[at:],
                marker[:at] + marker[at + 1 :],
                marker.upper(),
                marker.replace(".", ".0", 1),
                ".".join([marker.split(".")[0], draw(own).split(".")[1], draw(own).split(".")[2]]),
            ]
        )
    )


@st.composite
def nested(draw: st.DrawFn) -> str:
    outer, inner = draw(issued), draw(issued)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(outer)))
        outer = outer[:at] + inner + outer[at:]
    return outer


@st.composite
def truncated(draw: st.DrawFn) -> str:
    marker = draw(issued)
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(marker))] * 2)))
    return draw(noise) + marker[start:end] + draw(noise)


@st.composite
def reformed(draw: st.DrawFn) -> str:
    """Halves of a marker around something that is taken out of the text, a marker or what looks like one."""
    marker, between = draw(issued), draw(own | forged() | noise)
    at = draw(st.integers(1, len(marker) - 1))
    return marker[:at] + between + marker[at:]


ATTACKS = {
    "forged": forged(),
    "replayed across scopes": replayed(),
    "tampered": tampered(),
    "nested": nested(),
    "truncated": truncated(),
    "re-formed": reformed(),
}
