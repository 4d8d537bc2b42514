//! The verifier: every invariant of a Program, stated once.

use crate::{CacheLayer, Node, Program, ValueId};
use formats::{Error, Result};
use ops::Rows;
use ops::operation::{CacheUse, StateAccess};

impl Program {
    /// Checks that every value is written once and before it is read, that shapes agree with the
    /// operations' rules, and that cache layers are written before they are read, with one
    /// geometry.
    ///
    /// # Errors
    /// The first of these that does not hold, with the node's number and operation.
    pub fn verify(&self) -> Result<()> {
        let mut written = vec![false; self.values.len()];
        let mut cached = vec![false; self.layers.len()];
        if let Some(input) = self.input {
            if self.values.get(input.0).is_none_or(|shape| shape.rows != Rows::Tokens) {
                let found = format!("%{}", input.0);
                return Err(Error::new("program: input", "a value of a row per token", found));
            }
            written[input.0] = true;
        }
        for (i, node) in self.nodes.iter().enumerate() {
            let place = format!("program: node {i} ({})", node.op.name());
            for value in &node.inputs {
                self.known(&place, &written, *value)?;
            }
            if let Some(weight) = node.weights.iter().find(|w| w.0 >= self.weights.len()) {
                return Err(Error::new(
                    place,
                    format!("a weight below {}", self.weights.len()),
                    weight.0,
                ));
            }
            let inputs: Vec<_> = node.inputs.iter().map(|v| self.shape(*v)).collect();
            let weights: Vec<_> =
                node.weights.iter().map(|w| self.weights[w.0].shape.as_slice()).collect();
            let shapes = node
                .op
                .infer(&inputs, &weights)
                .map_err(|e| Error { place: format!("{place}: {}", e.place), ..e })?;
            let declared: Vec<_> =
                node.outputs.iter().filter_map(|v| self.values.get(v.0).copied()).collect();
            if shapes != declared {
                return Err(Error::new(
                    place,
                    format!("outputs {shapes:?}"),
                    format!("{declared:?}"),
                ));
            }
            for value in &node.outputs {
                if std::mem::replace(&mut written[value.0], true) {
                    return Err(Error::new(
                        place,
                        "each value written once",
                        format!("%{} again", value.0),
                    ));
                }
            }
            self.verify_cache(&place, i, &mut cached)?;
            self.verify_site(&place, i)?;
        }
        for value in self.results.iter().chain(self.traces.iter().map(|(_, v)| v)) {
            self.known("program: results", &written, *value)?;
        }
        Ok(())
    }

    fn known(&self, place: &str, written: &[bool], value: ValueId) -> Result<()> {
        match written.get(value.0) {
            Some(true) => Ok(()),
            _ => Err(Error::new(place, "a value written before", format!("%{}", value.0))),
        }
    }

    fn verify_site(&self, place: &str, node: usize) -> Result<()> {
        let node = &self.nodes[node];
        let Some(index) = node.op.site() else { return Ok(()) };
        let Some(site) = self.sites.get(index) else {
            let expected = format!("a site below {}", self.sites.len());
            return Err(Error::new(place, expected, index));
        };
        let width = |input: usize| node.inputs.get(input).map(|v| self.shape(*v).width);
        let (input, output) = (width(1), width(0));
        if input != (!site.gathers).then_some(site.input) || output != Some(site.output) {
            let expected = format!("{} to {}", site.input, site.output);
            return Err(Error::new(place, expected, format!("{input:?} to {output:?}")));
        }
        Ok(())
    }

    fn verify_cache(&self, place: &str, node: usize, cached: &mut [bool]) -> Result<()> {
        let at = node;
        let node = &self.nodes[at];
        let Some(CacheUse { layer: index, access }) = node.op.cache() else { return Ok(()) };
        let Some(layer) = self.layers.get(index) else {
            return Err(Error::new(
                place,
                format!("a cache layer below {}", self.layers.len()),
                index,
            ));
        };
        match access {
            StateAccess::Carry { start, elements } => {
                let end = start.saturating_add(elements);
                if *layer != CacheLayer::carried(layer.state) || end > layer.state {
                    let expected = format!("a state of {end} elements or more");
                    return Err(Error::new(place, expected, format!("{layer:?}")));
                }
                let other = |before: &Node| match before.op.cache() {
                    Some(CacheUse {
                        layer,
                        access: StateAccess::Carry { start: from, elements },
                    }) => layer == index && from < end && start < from.saturating_add(elements),
                    _ => false,
                };
                if self.nodes[..at].iter().any(other) {
                    return Err(Error::new(place, "one operation for each part of a state", "two"));
                }
                cached[index] = true;
            }
            StateAccess::Read { kv_heads, head_dim, window } => {
                let read = CacheLayer::keys_values(kv_heads, head_dim, window);
                let read = CacheLayer { keys_only: layer.keys_only, ..read };
                if read != *layer {
                    return Err(Error::new(place, format!("{layer:?}"), format!("{read:?}")));
                }
                if !cached[index] {
                    return Err(Error::new(place, "the layer's cache written before", "a read"));
                }
            }
            StateAccess::Append { keys } => {
                let keys = self.shape(node.inputs[keys]);
                let width = layer.kv_heads * layer.head_dim;
                if layer.keys_only != (node.inputs.len() == 1) {
                    let expected = if layer.keys_only { "keys alone" } else { "keys and values" };
                    return Err(Error::new(place, expected, node.inputs.len()));
                }
                if keys.width != width || layer.state > 0 {
                    let expected = format!("keys of {width} elements");
                    return Err(Error::new(place, expected, keys.width));
                }
                if std::mem::replace(&mut cached[index], true) {
                    return Err(Error::new(place, "one write per cache layer", "another"));
                }
            }
        }
        Ok(())
    }
}
