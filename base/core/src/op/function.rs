//! Functions of one element, and gated linear units.

use serde::{Deserialize, Serialize};

/// Defines an enumeration of functions from a table with a name for each, and parameters with
/// sample values.
macro_rules! functions {
    (
        $(#[$type_doc:meta])* $type:ident, $all:literal;
        $(
            $(#[$doc:meta])*
            $kind:ident $({ $($(#[$field_doc:meta])* $field:ident: $sample:literal,)* })? => $name:literal;
        )*
    ) => {
        $(#[$type_doc])*
        /// Parameters are compared bit by bit.
        #[derive(Clone, Copy, Debug, Serialize, Deserialize)]
        pub enum $type {
            $(
                $(#[$doc])*
                $kind $({ $($(#[$field_doc])* #[serde(with = "crate::exact")] $field: f32,)* })?,
            )*
        }

        impl PartialEq for $type {
            fn eq(&self, other: &Self) -> bool {
                match self {
                    $($type::$kind $({ $($field),* })? => {
                        let mine = [0, $($($field.to_bits()),*)?];
                        match other {
                            $type::$kind $({ $($field),* })? => mine == [0,
                                $($($field.to_bits()),*)?],
                            _ => false,
                        }
                    })*
                }
            }
        }

        impl Eq for $type {}

        impl $type {
            #[doc = $all]
            pub const ALL: [$type; [$($name),*].len()] = [$($type::$kind $({ $($field: $sample),* })?),*];

            /// Returns ggml's name.
            pub fn name(self) -> &'static str {
                match self {
                    $($type::$kind { .. } => $name,)*
                }
            }
        }
    };
}

functions! {
    /// Functions of one element, numbered as ggml's.
    #[allow(missing_docs)] // standard functions under their usual names
    Unary, "One of each, with sample parameters where there are any: for tables and tests.";

    Abs => "abs";
    /// Sign: -1, 0 or 1.
    Sgn => "sgn";
    Neg => "neg";
    /// 1 where the element is positive, else 0.
    Step => "step";
    Tanh => "tanh";
    /// `x` where positive, else `exp(x) - 1`.
    Elu => "elu";
    Relu => "relu";
    Sigmoid => "sigmoid";
    /// GELU, approximated with tanh.
    Gelu => "gelu";
    /// `x * sigmoid(1.702 x)`.
    GeluQuick => "gelu_quick";
    Silu => "silu";
    /// `x * clamp((x + 3) / 6, 0, 1)`.
    HardSwish => "hardswish";
    /// `clamp((x + 3) / 6, 0, 1)`.
    HardSigmoid => "hardsigmoid";
    Exp => "exp";
    /// `exp(x) - 1`.
    ExpM1 => "expm1";
    /// `log(1 + exp(x))`; the identity above 20.
    SoftPlus => "softplus";
    /// GELU, defined with the error function.
    GeluErf => "gelu_erf";
    /// Expanded integral of the ELU ([Huang 2024](https://arxiv.org/abs/2411.13010)), with
    /// parameters as ggml stores them: `alpha_n` already holds `beta + softplus(·)`, `alpha_p`
    /// `softplus(·)`.
    Xielu {
        alpha_n: 4.0,
        alpha_p: 20.0,
        beta: 0.5,
        eps: 1e-7,
    } => "xielu";
    Floor => "floor";
    Ceil => "ceil";
    /// Rounds to the nearest integer, halves away from zero.
    Round => "round";
    Trunc => "trunc";
}

functions! {
    /// Gated linear units, numbered as ggml's.
    Glu, "One of each, with the usual parameters: for tables and tests.";

    /// `relu(x) * g`.
    Reglu => "reglu";
    /// `gelu(x) * g`, with tanh.
    Geglu => "geglu";
    /// `silu(x) * g`.
    Swiglu => "swiglu";
    /// Function of gpt-oss: `x' * sigmoid(alpha * x') * (1 + g')`, where `x' = min(x, limit)` and
    /// `g' = clamp(g, -limit, limit)`.
    SwigluOai {
        /// Steepness of the sigmoid.
        alpha: 1.702,
        /// Limit of both halves.
        limit: 7.0,
    } => "swiglu_oai";
    /// `gelu(x) * g`, with the error function.
    GegluErf => "geglu_erf";
    /// `gelu_quick(x) * g`.
    GegluQuick => "geglu_quick";
    /// `silu(x') * g'`, where `x' = min(x, limit)` and `g' = clamp(g, -limit, limit)`.
    SwigluClamp {
        /// Limit of both halves.
        limit: 7.0,
    } => "swiglu_clamp";
}
