//! Bit-exact serialization of floats.
//!
//! JSON has no infinities and no NaN. They are written as text: `"inf"`, `"-inf"`, and
//! `"nan:7fc00000"` with the bits of the NaN.

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserializer, Serializer};
use std::fmt;

const EXPECTED: &str = "a number, \"inf\", \"-inf\" or \"nan:\" and eight hexadecimal digits";

pub fn serialize<S: Serializer>(x: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    if !serializer.is_human_readable() {
        return serializer.serialize_u32(x.to_bits());
    }
    match *x {
        // An f64 represents every f32, and its digits parse back to the same f32.
        x if x.is_finite() => serializer.serialize_f64(f64::from(x)),
        f32::INFINITY => serializer.serialize_str("inf"),
        f32::NEG_INFINITY => serializer.serialize_str("-inf"),
        nan => serializer.collect_str(&format_args!("nan:{:08x}", nan.to_bits())),
    }
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    if deserializer.is_human_readable() {
        deserializer.deserialize_any(Exact)
    } else {
        <u32 as serde::Deserialize>::deserialize(deserializer).map(f32::from_bits)
    }
}

struct Exact;

impl Visitor<'_> for Exact {
    type Value = f32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<f32, E> {
        let narrow = x as f32;
        if narrow.is_finite() {
            Ok(narrow)
        } else {
            Err(E::invalid_value(Unexpected::Float(x), &self))
        }
    }

    fn visit_u64<E: Error>(self, x: u64) -> Result<f32, E> {
        Ok(x as f32)
    }

    fn visit_i64<E: Error>(self, x: i64) -> Result<f32, E> {
        Ok(x as f32)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<f32, E> {
        let nan = |digits: &str| {
            let bits = u32::from_str_radix(digits, 16).ok();
            bits.map(f32::from_bits).filter(|x| x.is_nan())
        };
        match text {
            "inf" => Some(f32::INFINITY),
            "-inf" => Some(f32::NEG_INFINITY),
            _ => text.strip_prefix("nan:").and_then(nan),
        }
        .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

#[cfg(test)]
mod tests {
    use crate::Op;

    fn through_json(value: f32) -> f32 {
        let text = serde_json::to_string(&Op::Fill { value }).unwrap();
        match serde_json::from_str(&text).unwrap() {
            Op::Fill { value } => value,
            other => panic!("{other:?}"),
        }
    }

    proptest::proptest! {
        #[test]
        fn every_float_round_trips_bit_for_bit(bits in proptest::num::u32::ANY) {
            let x = f32::from_bits(bits);
            proptest::prop_assert_eq!(through_json(x).to_bits(), bits);
        }
    }

    #[test]
    fn special_floats_round_trip_bit_for_bit() {
        for bits in [
            0,
            0x8000_0000,
            0x7f80_0000,
            0xff80_0000,
            0x7fc0_0000,
            0xffc0_0000,
            0x7f80_0001,
            0x7fff_ffff,
            1,
            0x007f_ffff,
            0x7f7f_ffff,
        ] {
            assert_eq!(
                through_json(f32::from_bits(bits)).to_bits(),
                bits,
                "{bits:08x}"
            );
        }
    }

    #[test]
    fn invalid_floats_are_refused() {
        for wrong in [
            "null",
            "\"nan\"",
            "\"nan:3f800000\"",
            "\"nan:zz\"",
            "1e39",
            "true",
            "\"infinity\"",
        ] {
            let text = format!("{{\"Fill\":{{\"value\":{wrong}}}}}");
            assert!(serde_json::from_str::<Op>(&text).is_err(), "{wrong}");
        }
    }
}
