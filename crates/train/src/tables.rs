//! The table of embeddings and the head, trained whole beside an adapter's factors, as PEFT's
//! `modules_to_save` has them. Where a model has one matrix for both, each that is trained gets a
//! copy of its own, as PEFT gives it.

use crate::{LoraOptions, Parameter, peft};
use adapters::Base;
use formats::{Error, Result};
use ops::embed::Index;
use ops::{Embed, Op};
use program::{Node, Program, Site, Weight, WeightId};

/// What the table of embeddings is called among [`LoraOptions::whole`].
pub const EMBEDDINGS: &str = "embeddings";
/// What the head is called there.
pub const HEAD: &str = "head";

/// A table that is trained whole.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WholeTable {
    /// Its module in Hugging Face's model.
    pub(crate) module: String,
    /// The trained weight.
    pub(crate) weight: WeightId,
}

impl WholeTable {
    /// Its values as the model's files have them.
    ///
    /// # Errors
    /// A matrix that cannot be read.
    pub(crate) fn parameter(&self, program: &Program, base: &Base<'_>) -> Result<Parameter> {
        let weight = &program.weights[self.weight.0];
        let name = format!("base_model.model.{}.weight", self.module);
        let values = weight.read(base.tensors)?.to_f32()?;
        Ok(Parameter { name, shape: weight.shape.clone(), values, decays: true })
    }
}

/// The tables of a model that can be trained so, with their names here and in Hugging Face's model.
fn known(base: &Base<'_>) -> Vec<(Site, &'static str, String)> {
    let sites = base.program.adaptable().into_iter();
    let outside = sites.filter(|s| s.experts.is_none() && !s.name.starts_with("blocks."));
    let named = |site: Site| {
        let name = if site.gathers { EMBEDDINGS } else { HEAD };
        let module = peft::module_name(base, &site)?;
        Some((site, name, module))
    };
    outside.filter_map(named).collect()
}

/// Whether a node uses a site's matrix as the site does.
fn uses(node: &Node, site: &Site) -> bool {
    let own = node.weights.first() == Some(&site.weight);
    own && match node.op {
        Op::Embed(Embed { index: Index::Token }) => site.gathers,
        Op::Linear(_) => !site.gathers,
        _ => false,
    }
}

/// The Program with a weight of its own for each table that is to be trained.
///
/// # Errors
/// A name that no table has.
pub(crate) fn apart(
    base: &Base<'_>,
    program: &Program,
    options: &LoraOptions,
) -> Result<(Program, Vec<WholeTable>)> {
    let (mut of, mut tables) = (program.clone(), Vec::<WholeTable>::new());
    let known = known(base);
    for wanted in &options.whole {
        let named = |(_, name, module): &&(Site, &str, String)| {
            name == wanted || peft::ends(module, wanted)
        };
        let used = |of: &Program, site: &Site| of.nodes.iter().position(|node| uses(node, site));
        let found = known.iter().find(named);
        let found = found.and_then(|(site, _, module)| Some((site, module, used(&of, site)?)));
        let Some((site, module, at)) = found else {
            let names: Vec<&str> = known.iter().map(|(_, name, _)| *name).collect();
            return Err(Error::new("whole", format!("some of {}", names.join(", ")), wanted));
        };
        if tables.iter().any(|table| table.module == *module) {
            continue;
        }
        let others = of.nodes.iter().filter(|node| node.weights.contains(&site.weight)).count() > 1;
        let mut weight = site.weight;
        if others {
            let own = of.weights[site.weight.0].clone();
            of.weights.push(Weight { name: format!("{}.whole", own.name), ..own });
            weight = WeightId(of.weights.len() - 1);
            of.nodes[at].weights[0] = weight;
        }
        tables.push(WholeTable { module: module.clone(), weight });
    }
    of.verify()?;
    Ok((of, tables))
}
