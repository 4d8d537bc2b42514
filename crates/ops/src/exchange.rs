//! Rows that a Program hands to another device's, and those that it is handed for them: where
//! operations of a model lie on several devices and take turns. It computes nothing; whoever
//! replays the Program has the other side compute.

use formats::Result;

use crate::operation::{ActivationPrecision, Operand, Operation, ReferenceCall, Sharding};
use crate::{Shape, arity};

/// `gives.. -> brings..`, of any shapes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Exchange {
    /// Which of the Program's exchanges it is, from 0 on.
    pub number: usize,
    /// The shapes of what it brings.
    pub brings: Vec<Shape>,
}

impl Operation for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("exchange", inputs, inputs.len(), weights, &[0])?;
        Ok(self.brings.clone())
    }

    /// Does nothing: the interpreter of both sides has already put the values there.
    fn reference(&self, _: &mut ReferenceCall<'_>) {}

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn shares_type(&self, _: Operand) -> bool {
        false
    }

    /// Values that go from one device to another are not rounded on the way.
    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Exact
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_and_brings_any_shapes_and_has_no_weights() {
        let brings = vec![Shape::tokens(8), Shape::tokens(3)];
        let op = Exchange { number: 2, brings: brings.clone() };
        assert_eq!(op.infer(&[], &[]).unwrap(), brings);
        assert_eq!(op.infer(&[Shape::tokens(5)], &[]).unwrap(), brings);
        assert!(op.infer(&[], &[&[4]]).is_err());
    }
}
