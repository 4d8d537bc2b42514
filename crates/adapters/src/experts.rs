//! Factors of experts: every expert of a mixture has a pair of its own. Files have them in one
//! tensor for all experts or in one each; devices take those of a whole stack.

use crate::{Base, Change, File, Stack};
use formats::{DType, Result, shape};
use ops::low_rank::Delta;
use program::{AdapterFactors, Site};

/// The factors of one expert, which files have by themselves.
struct Alone {
    expert: usize,
    rank: usize,
    /// `[rank, in]` and `[out, rank]`.
    down: Vec<f32>,
    up: Vec<f32>,
    scale: f64,
}

/// Experts whose factors files have one by one, by stacks.
#[derive(Default)]
pub(crate) struct Apart<'s>(Vec<(&'s Site, Vec<Alone>)>);

/// The stack of which a canonical name is one expert's matrix, and the expert:
/// `blocks.0.mlp.experts.gate` and 3 of `blocks.0.mlp.experts.3.gate`.
fn one_of(canonical: &str) -> Option<(String, usize)> {
    let (front, part) = canonical.rsplit_once('.')?;
    let (front, expert) = front.rsplit_once('.')?;
    let expert = expert.parse().ok()?;
    front.ends_with(".experts").then(|| (format!("{front}.{part}"), expert))
}

impl<'s> Apart<'s> {
    /// Takes the factors of a single expert's matrix; false where the change is of another kind.
    ///
    /// # Errors
    /// Factors of other shapes, an expert that there is not or that is there twice, DoRA.
    pub(crate) fn take(
        &mut self,
        file: &File,
        sites: &'s [Site],
        canonical: &str,
        change: &Change,
    ) -> Result<bool> {
        let Some((stack, expert)) = one_of(canonical) else { return Ok(false) };
        let Some(site) = self::stack(sites, &stack) else { return Ok(false) };
        if expert >= site.matrices() {
            let expected = format!("one of {} experts", site.matrices());
            return Err(file.wrong(&change.matrix, expected, expert));
        }
        file.plain(change)?;
        let (rank, down, up) = file.factors(change, site.input, site.output)?;
        let at = self.0.iter().position(|(of, _)| of.name == site.name).unwrap_or_else(|| {
            self.0.push((site, Vec::new()));
            self.0.len() - 1
        });
        let all = &mut self.0[at].1;
        if all.iter().any(|one| one.expert == expert) {
            return Err(file.wrong(&change.matrix, "each matrix once", "twice"));
        }
        all.push(Alone { expert, rank, down, up, scale: change.scale });
        Ok(true)
    }

    /// Joins the factors of each stack. Experts without any have zeros, as have ranks that others
    /// have more of.
    ///
    /// # Errors
    /// A stack that the file has as a whole, too.
    pub(crate) fn join(
        self,
        file: &File,
        strength: f64,
        adapter: &mut AdapterFactors,
    ) -> Result<()> {
        for (site, all) in self.0 {
            let rank = all.iter().map(|one| one.rank).max().unwrap_or(0);
            let scale = all.first().map_or(1.0, |one| one.scale);
            let mut down = vec![0.0; site.matrices() * rank * site.input];
            let mut up = vec![0.0; site.matrices() * rank * site.output];
            for one in all {
                // One scale is for all experts.
                let own = (one.scale / scale) as f32;
                down[one.expert * rank * site.input..][..one.down.len()].copy_from_slice(&one.down);
                for (o, row) in one.up.chunks_exact(one.rank).enumerate() {
                    let to = &mut up[(one.expert * site.output + o) * rank..][..one.rank];
                    to.iter_mut().zip(row).for_each(|(to, v)| *to = own * v);
                }
            }
            let scale = (scale * strength) as f32;
            let delta = Delta { rank, down, up, scale, gain: None, element: DType::F32 };
            if adapter.deltas.insert(site.name.clone(), delta).is_some() {
                return Err(file.wrong(&site.name, "each matrix once", "twice"));
            }
        }
        Ok(())
    }
}

/// How a tensor of PEFT's for a parameter of three axes is to be read.
struct Reading {
    /// Whether it is of gates and ups.
    gate_up: bool,
    /// Whether `lora_A` has the outputs and `lora_B` the inputs.
    turned: bool,
}

impl File {
    /// Refuses DoRA.
    fn plain(&self, change: &Change) -> Result<()> {
        match change.magnitude {
            None => Ok(()),
            Some(_) => Err(self.wrong(&change.matrix, "experts without DoRA", "magnitudes")),
        }
    }

    /// The changes of the stacks that a change of all experts goes to.
    ///
    /// # Errors
    /// A stack that the model does not have, factors of other shapes.
    pub(crate) fn stacks(
        &self,
        base: &Base<'_>,
        sites: &[Site],
        (change, stack): (&Change, &Stack),
        strength: f64,
    ) -> Result<Vec<(String, Delta)>> {
        self.plain(change)?;
        match stack {
            Stack::Each => {
                let architecture = base.config.architecture;
                let canonicals = architecture.canonicals(&change.matrix, self.is_gguf());
                let site = canonicals.iter().find_map(|name| self::stack(sites, name));
                let site = site.ok_or_else(|| {
                    let expected = "a stack of experts that the model has";
                    self.wrong(&change.matrix, expected, "none of that name")
                })?;
                Ok(vec![(site.name.clone(), self.each(site, change, strength)?)])
            }
            Stack::Parameter { gate_up, down, old } => {
                let parts = experts_of(sites, &change.matrix).ok_or_else(|| {
                    let expected = "experts of a block of the model";
                    self.wrong(&change.matrix, expected, "none that it has")
                })?;
                let architecture = base.config.architecture;
                let by_turns = architecture.gates_by_turns();
                let square = !by_turns && architecture.turns_experts() != *old;
                // Where gates are ups, one stands for both.
                let first = usize::from(parts[0].weight == parts[1].weight);
                let reading = self.reading(&parts[first..], change, square)?;
                let (rank, scale) = if reading.gate_up { *gate_up } else { *down };
                let of = if reading.gate_up { &parts[first..2] } else { &parts[2..] };
                self.parameter(of, change, (rank, scale * strength), (reading.turned, by_turns))
            }
        }
    }

    /// Factors that lie `[experts, rank, in]` and `[experts, out, rank]`.
    fn each(&self, site: &Site, change: &Change, strength: f64) -> Result<Delta> {
        let found = self.tensor(&change.down)?.shape.to_vec();
        let (experts, [input, output]) = (site.matrices(), [site.input, site.output]);
        let rank = found.get(1).copied().filter(|rank| *rank > 0).unwrap_or(1);
        let down = self.numbers(&change.down, &[&[experts, rank, input]])?;
        let up = self.numbers(&change.up, &[&[experts, output, rank]])?;
        let scale = (change.scale * strength) as f32;
        Ok(Delta { rank, down, up, scale, gain: None, element: DType::F32 })
    }

    /// Which of a mixture's stacks PEFT's factors are of, and which way round; the last of `parts`
    /// are the second matrices. What their shapes do not tell, where in and out are alike or there
    /// are no gates, `square` says.
    fn reading(&self, parts: &[&Site], change: &Change, square: bool) -> Result<Reading> {
        let (down, up) = (self.tensor(&change.down)?.shape, self.tensor(&change.up)?.shape);
        let (gate, outer) = (parts[0], parts[parts.len() - 1]);
        let (both, width) = ((parts.len() - 1) * gate.output, gate.input);
        let found = match (down, up) {
            (&[_, down], &[up, _]) => [down, up],
            _ => [0, 0],
        };
        let ways = [square, !square].into_iter().flat_map(|turned| {
            let sizes = [(true, [width, both]), (false, [outer.input, outer.output])];
            sizes.map(|(gate_up, [input, output])| {
                let sizes = if turned { [output, input] } else { [input, output] };
                (sizes, Reading { gate_up, turned })
            })
        });
        if let Some((_, reading)) = ways.into_iter().find(|(sizes, _)| *sizes == found) {
            return Ok(reading);
        }
        let experts = gate.matrices();
        let expected = format!(
            "[rank * {experts}, {width}] beside [{both}, ..], or [rank * {experts}, {}] beside \
             [{width}, ..]",
            outer.input
        );
        let found = format!("{} beside {}", shape(down), shape(up));
        Err(self.wrong(&change.down, expected, found))
    }

    /// PEFT's factors of a parameter of three axes, which is one stack, or two whose rows lie one
    /// behind the other in each expert, or by turns.
    fn parameter(
        &self,
        parts: &[&Site],
        change: &Change,
        (stated, scale): (f64, f64),
        (turned, by_turns): (bool, bool),
    ) -> Result<Vec<(String, Delta)>> {
        let (experts, input) = (parts[0].matrices(), parts[0].input);
        let output: usize = parts.iter().map(|site| site.output).sum();
        let ranks = self.tensor(&change.down)?.shape.first().copied().unwrap_or(0);
        let rank = ranks / experts;
        if rank == 0 || rank * experts != ranks || rank as f64 != stated {
            let expected = format!("rank {stated} of each of {experts} experts");
            return Err(self.wrong(&change.down, expected, format!("{ranks} rows")));
        }
        let [first, second] = if turned { [output, input] } else { [input, output] };
        // `[expert, rank, first]` and `[second, rank, expert]`.
        let a = self.numbers(&change.down, &[&[ranks, first]])?;
        let b = self.numbers(&change.up, &[&[second, ranks]])?;
        let of_a = |e: usize, k: usize, i: usize| a[(e * rank + k) * first + i];
        let of_b = |e: usize, k: usize, i: usize| b[i * ranks + k * experts + e];
        let low = |e, k, i| if turned { of_b(e, k, i) } else { of_a(e, k, i) };
        let high = |e, k, o| if turned { of_a(e, k, o) } else { of_b(e, k, o) };
        let mut down = Vec::with_capacity(ranks * input);
        for e in 0..experts {
            for k in 0..rank {
                down.extend((0..input).map(|i| low(e, k, i)));
            }
        }
        let mut all = Vec::new();
        for (part, site) in parts.iter().enumerate() {
            let row = |o: usize| match by_turns {
                true => o * parts.len() + part,
                false => parts[..part].iter().map(|site| site.output).sum::<usize>() + o,
            };
            let mut up = Vec::with_capacity(experts * site.output * rank);
            for e in 0..experts {
                for o in 0..site.output {
                    up.extend((0..rank).map(|k| high(e, k, row(o))));
                }
            }
            let (down, scale) = (down.clone(), scale as f32);
            let delta = Delta { rank, down, up, scale, gain: None, element: DType::F32 };
            all.push((site.name.clone(), delta));
        }
        Ok(all)
    }
}

/// The stack of experts' matrices of this name. Where gates are ups, the one matrix has the gates'
/// name.
fn stack<'s>(sites: &'s [Site], name: &str) -> Option<&'s Site> {
    let of = |name: &str| sites.iter().find(|site| site.name == name && site.experts.is_some());
    of(name).or_else(|| of(&format!("{}.gate", name.strip_suffix(".up")?)))
}

/// Gate, up and down of the block whose module of experts has this name.
fn experts_of<'s>(sites: &'s [Site], module: &str) -> Option<[&'s Site; 3]> {
    let (_, behind) = module.rsplit_once("layers.")?;
    let block = behind.split_once('.')?.0.parse::<usize>().ok()?;
    let front = format!("blocks.{block}.");
    let part = |end: &str| {
        let own = |site: &&Site| {
            site.experts.is_some() && site.name.starts_with(&front) && site.name.ends_with(end)
        };
        sites.iter().find(own)
    };
    let gate = part(".gate")?;
    // There is no other where gates are ups.
    Some([gate, part(".up").unwrap_or(gate), part(".down")?])
}
