//! From an adapter's file to factors at the sites of a model.

use crate::experts::Apart;
use crate::pieces::{Piece, Pieces};
use crate::renewed::add_offset;
use crate::{AdapterFormat, Change, File, Stored, gguf};
use formats::{
    DType, Encoding, Error, ErrorKind, Folder, NotFinite, Pairing, Result, Source, TensorView,
    Tensors, shape,
};
use models::Config;
use ops::Op;
use ops::gradient::Gradient;
use ops::low_rank::{Delta, Gain};
use program::{AdapterFactors, Program, Site, WeightId};

/// The model that an adapter is for.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    /// Its configuration.
    pub config: &'a Config,
    /// Its Program, whose matrices are the sites.
    pub program: &'a Program,
    /// Its files.
    pub tensors: &'a Tensors,
}

impl Base<'_> {
    fn is_gguf(&self) -> bool {
        self.tensors.gguf().is_some()
    }

    /// For each row of a site, the row of Hugging Face's form that it is; none where the order is
    /// the same. GGUF files of some architectures, and Mistral's own, have the pairs that rotate
    /// together side by side, where Hugging Face has them half a head apart. GGUF files of Qwen3.5
    /// have the first head of values of each key in front of the second of any.
    pub fn order(&self, site: &Site) -> Option<Vec<usize>> {
        if let Some(rows) = self.by_turns(site, site.output) {
            return (!site.name.ends_with(".delta.o")).then_some(rows);
        }
        let rope = self.config.rope.as_ref();
        let adjacent = rope.is_some_and(|rope| rope.pairing == Pairing::Adjacent);
        let mistrals = self.tensors.folder().is_some_and(Folder::is_mistrals);
        ((self.is_gguf() || mistrals) && adjacent)
            .then(|| self.of_heads(site, |i, half| i % 2 * half + i / 2))?
    }

    /// The same of columns: of what reads the values of such a net.
    pub fn column_order(&self, site: &Site) -> Option<Vec<usize>> {
        self.by_turns(site, site.input).filter(|_| site.name.ends_with(".delta.o"))
    }

    /// The same for the `count` rows or columns of a delta net's matrix, whose keys are shared by
    /// several heads of values. Such a GGUF file has the first head of each key, then the second of
    /// each; Hugging Face's form has all heads of the first key, then those of the second.
    fn by_turns(&self, site: &Site, count: usize) -> Option<Vec<usize>> {
        let (_, part) = site.name.split_once(".delta.").filter(|_| self.is_gguf())?;
        let net = self.program.nodes.iter().find_map(|node| match &node.op {
            Op::DeltaNet(net) => Some(net),
            Op::Gradient(Gradient::PackedDelta(of)) => Some(&of.0),
            _ => None,
        });
        let net = net.filter(|net| net.tiled)?;
        // Elements of a head, and those in front of all heads.
        let (each, first) = match part {
            "a" | "b" => (1, 0),
            "z" | "o" => (net.value_dim, 0),
            "qkv" => (net.value_dim, 2 * net.key_heads * net.key_dim),
            _ => return None,
        };
        let own = |i: usize| {
            let (head, within) = (i / each, i % each);
            let (key, turn) = (head % net.key_heads, head / net.key_heads);
            first + (key * (net.heads / net.key_heads) + turn) * each + within
        };
        let all = (0..first).chain((0..net.heads * each).map(own));
        Some(all.collect()).filter(|all: &Vec<usize>| all.len() == count)
    }

    /// Whether GGUF files have the rows or columns of a site in another order than Hugging Face's
    /// form, and not for rotations, which is not known: see [`Config::gguf_orders`].
    pub fn reorders(&self, site: &Site) -> bool {
        let known = self.order(site).is_some() || self.column_order(site).is_some();
        !known && self.config.gguf_orders.iter().any(|part| site.name.contains(part))
    }

    /// Rows of a site that rotates, each head's in an order that is given half a head.
    fn of_heads(&self, site: &Site, order: impl Fn(usize, usize) -> usize) -> Option<Vec<usize>> {
        let rotates = [".attention.q", ".attention.k"].iter().any(|end| site.name.ends_with(end));
        let d = self.config.head_dim;
        let row = |i: usize| i / d * d + order(i % d, d / 2);
        (rotates && d > 0).then(|| (0..site.output).map(row).collect())
    }
}

/// The matrices of a model that can change, and those that files keep in pieces, by these.
struct Sites<'s> {
    all: &'s [Site],
    pieces: Vec<(&'s Site, Piece<'s>)>,
}

impl<'s> Sites<'s> {
    fn new(base: &'s Base<'_>, all: &'s [Site]) -> Result<Sites<'s>> {
        let mut pieces = Vec::new();
        for site in all.iter().filter(|site| site.experts.is_none() && !site.gathers) {
            pieces.extend(base.pieces(site.weight)?.into_iter().map(|piece| (site, piece)));
        }
        Ok(Sites { all, pieces })
    }

    /// The names of the matrices of files that a site is.
    fn names<'n>(&'n self, site: &'n Site) -> Vec<&'n str> {
        let of = self.pieces.iter().filter(|(of, _)| of.name == site.name);
        let pieces: Vec<&str> = of.map(|(_, piece)| piece.name.as_str()).collect();
        if pieces.is_empty() { vec![&site.name] } else { pieces }
    }
}

/// A site that a change goes to, and for each of its rows which of the change's it is.
struct Target<'a> {
    site: &'a Site,
    rows: Vec<usize>,
    /// Rows of all that the change covers.
    all: usize,
    /// The first row of the site that the change goes to, if it is a piece of the site.
    first: Option<usize>,
}

impl File {
    /// The adapter's change of a model, `strength` times.
    ///
    /// # Errors
    /// A matrix that the model does not have, factors of other shapes or that are not finite, by
    /// file and key.
    pub fn resolve(&self, base: &Base<'_>, strength: f64) -> Result<AdapterFactors> {
        if !strength.is_finite() {
            let place = self.path.display();
            return Err(Error::new(place, "a scale that is finite", strength));
        }
        if let Stored::Gguf(file) = &self.tensors {
            let own = base.config.architecture.gguf;
            if let Some(name) = gguf::architecture(file)?.filter(|name| *name != own) {
                let found: String = name.chars().take(60).collect();
                let place = format!("{}: general.architecture", self.path.display());
                return Err(Error::new(place, own, found));
            }
        }
        let sites = base.program.adaptable();
        let known = Sites::new(base, &sites)?;
        let mut adapter = AdapterFactors::default();
        let (mut apart, mut pieces) = (Apart::default(), Pieces::default());
        for change in &self.changes {
            if let Some(stack) = &change.stack {
                for (name, delta) in self.stacks(base, &sites, (change, stack), strength)? {
                    if adapter.deltas.insert(name, delta).is_some() {
                        return Err(self.wrong(&change.matrix, "each matrix once", "twice"));
                    }
                }
                continue;
            }
            let mut taken = false;
            for name in base.config.architecture.canonicals(&change.matrix, self.is_gguf()) {
                taken = taken || apart.take(self, &sites, &name, change)?;
            }
            if taken {
                continue;
            }
            let targets = self.targets(base, &known, change)?;
            let [input, output] = match targets.first() {
                Some(target) => [target.site.input, target.all],
                None => continue,
            };
            let (rank, down, up) = self.factors(change, input, output)?;
            let magnitude = match &change.magnitude {
                Some(name) => Some(self.numbers(name, &[&[output], &[output, 1], &[1, output]])?),
                None => None,
            };
            if magnitude.is_some() && change.gathers {
                let expected = "DoRA of matrices that are multiplied with";
                return Err(self.wrong(&change.matrix, expected, "of a table of embeddings"));
            }
            let bias = match &change.bias {
                Some(name) => Some(self.numbers(name, &[&[output]])?),
                None => None,
            };
            if let (Some(name), Some(_)) =
                (&change.bias, targets.iter().find(|target| target.first.is_some()))
            {
                let expected = "a matrix that is no piece of another in the model";
                let error = self.wrong(name, expected, "a bias of its factors");
                return Err(error.of(ErrorKind::Unsupported));
            }
            for Target { site, rows, first, .. } in targets {
                let mut delta = Delta {
                    rank,
                    down: down.clone(),
                    up: reordered(&up, rank, &rows),
                    scale: (change.scale * strength) as f32,
                    gain: None,
                    element: DType::F32,
                };
                if let Some(order) = self.column_order(base, site) {
                    let rows = delta.down.chunks_exact(order.len());
                    let row = |row: &[f32]| order.iter().map(|i| row[*i]).collect::<Vec<f32>>();
                    delta.down = rows.flat_map(row).collect();
                }
                let mut own = magnitude.as_ref().map(|all| reordered(all, 1, &rows));
                if let Some(order) = self.order(base, site) {
                    delta.up = reordered(&delta.up, rank, &order);
                    own = own.map(|values| reordered(&values, 1, &order));
                }
                if own.is_some() && strength != 1.0 {
                    let expected = "a scale of 1, since DoRA also changes magnitudes";
                    return Err(self.wrong(&change.matrix, expected, strength));
                }
                if let Some(first) = first {
                    if !pieces.take(site, first, delta, own) {
                        return Err(self.wrong(&change.matrix, "each matrix once", "twice"));
                    }
                    continue;
                }
                if let Some(magnitude) = own {
                    let magnitude: Vec<Option<f32>> = magnitude.into_iter().map(Some).collect();
                    delta.gain = Some(gain(base, site, &delta, &magnitude)?);
                }
                let scale = delta.scale;
                if adapter.deltas.insert(site.name.clone(), delta).is_some() {
                    return Err(self.wrong(&change.matrix, "each matrix once", "twice"));
                }
                if let Some(bias) = &bias {
                    let mut own = reordered(bias, 1, &rows);
                    if let Some(order) = self.order(base, site) {
                        own = reordered(&own, 1, &order);
                    }
                    add_offset(site, own.into_iter().map(|v| scale * v), &mut adapter);
                }
            }
            if self.kind == AdapterFormat::Mlx && change.gathers {
                self.tie(base, &sites, change, (rank, &down, &up), strength, &mut adapter)?;
            }
        }
        apart.join(self, strength, &mut adapter)?;
        pieces.join(self, base, &mut adapter)?;
        self.renew(base, &sites, strength, &mut adapter)?;
        Ok(adapter)
    }

    /// The sites whose products add a module's bias, each with the rows of the bias that it adds;
    /// none where the module is no such product.
    pub(crate) fn biased<'s>(
        &self,
        base: &'s Base<'_>,
        sites: &'s [Site],
        module: &str,
    ) -> Result<Vec<(&'s Site, Vec<usize>)>> {
        let known = Sites::new(base, sites)?;
        let change = Change { matrix: module.to_owned(), ..Change::default() };
        for name in base.config.architecture.canonicals(module, self.is_gguf()) {
            if let Some(targets) = self.targets_named(base, &known, &name, &change)? {
                let whole = targets.into_iter().filter(|target| target.first.is_none());
                return Ok(whole.map(|target| (target.site, target.rows)).collect());
            }
        }
        Ok(Vec::new())
    }

    /// Whether its names are GGUF's.
    pub(crate) fn is_gguf(&self) -> bool {
        self.kind == AdapterFormat::Gguf
    }

    /// mlx-lm multiplies with an adapted table of embeddings too, where the head is that table:
    /// with the factors exchanged.
    fn tie(
        &self,
        base: &Base<'_>,
        sites: &[Site],
        change: &Change,
        (rank, down, up): (usize, &[f32], &[f32]),
        strength: f64,
        adapter: &mut AdapterFactors,
    ) -> Result<()> {
        let Some(head) = sites.iter().find(|s| s.name == "head").filter(|_| base.config.tied)
        else {
            return Ok(());
        };
        let delta = Delta {
            rank,
            down: turned(up, rank),
            up: down.to_vec(),
            scale: (change.scale * strength) as f32,
            gain: None,
            element: DType::F32,
        };
        adapter.deltas.insert(head.name.clone(), delta);
        Ok(())
    }

    /// The sites that a change goes to: one, or those that the base keeps in one fused matrix, or
    /// the one of which the changed matrix is a piece. Of several canonical names the first that
    /// the base has, whole or in parts.
    fn targets<'s>(
        &self,
        base: &Base<'_>,
        sites: &Sites<'s>,
        change: &Change,
    ) -> Result<Vec<Target<'s>>> {
        let architecture = base.config.architecture;
        let gguf = self.is_gguf();
        let unknown = || {
            let known: Vec<String> = sites
                .all
                .iter()
                .filter(|site| site.name.starts_with("blocks.0.") || !site.name.contains('.'))
                .filter(|site| site.experts.is_none())
                .flat_map(|site| sites.names(site))
                .flat_map(|name| architecture.stored(name, gguf).into_iter().next())
                .map(|name| name.trim_end_matches(".weight").to_owned())
                .collect();
            self.wrong(&change.matrix, "a matrix of the model", "none that it has")
                .hint(format!("in its first block it has {}", known.join(", ")))
        };
        for name in architecture.canonicals(&change.matrix, gguf) {
            if let Some(targets) = self.targets_named(base, sites, &name, change)? {
                return Ok(targets);
            }
        }
        Err(unknown())
    }

    /// The site of a canonical name, or the sites that the base keeps in the one matrix that has
    /// it, or the site of which it names a piece; `None` if it has none of these.
    fn targets_named<'s>(
        &self,
        base: &Base<'_>,
        sites: &Sites<'s>,
        name: &str,
        change: &Change,
    ) -> Result<Option<Vec<Target<'s>>>> {
        let named = |site: &&Site| {
            site.name == name && site.gathers == change.gathers && site.experts.is_none()
        };
        if let Some(site) = sites.all.iter().find(named) {
            self.check_order(base, site)?;
            // A gate of each head has the row of its head for every element.
            let source = &base.program.weights[site.weight.0].source;
            let stored = fused(source, site.output).filter(|_| !site.gathers);
            let rows = stored.map(|(_, rows)| rows).filter(|rows| repeats(rows));
            let rows = rows.unwrap_or_else(|| (0..site.output).collect());
            let all = rows.last().map_or(0, |last| last + 1);
            return Ok(Some(vec![Target { site, rows, all, first: None }]));
        }
        let mut pieces = sites.pieces.iter().filter(|(_, piece)| piece.name == name);
        if let Some((site, piece)) = pieces.next().filter(|_| !change.gathers) {
            self.check_order(base, site)?;
            let (all, first) = (piece.rows.len(), Some(piece.rows.start));
            return Ok(Some(vec![Target { site, rows: (0..all).collect(), all, first }]));
        }
        let stored = base.config.architecture.stored(name, base.is_gguf());
        let part = |site: &'s Site| {
            let source = &base.program.weights[site.weight.0].source;
            let plain = site.experts.is_none();
            let (tensor, rows) = plain.then(|| fused(source, site.output)).flatten()?;
            stored.iter().any(|name| name == tensor).then_some((site, rows))
        };
        let parts: Vec<(&Site, Vec<usize>)> = sites.all.iter().filter_map(part).collect();
        let mut covered: Vec<usize> = parts.iter().flat_map(|(_, rows)| rows).copied().collect();
        covered.sort_unstable();
        let all = covered.len();
        if parts.is_empty() || change.gathers || covered.into_iter().ne(0..all) {
            return Ok(None);
        }
        parts.iter().try_for_each(|(site, _)| self.check_order(base, site))?;
        let target = |(site, rows)| Target { site, rows, all, first: None };
        Ok(Some(parts.into_iter().map(target).collect()))
    }

    /// Matrices whose heads lie otherwise in the base than in the adapter are refused.
    pub(crate) fn check_order(&self, base: &Base<'_>, site: &Site) -> Result<()> {
        let own = self.kind == AdapterFormat::Gguf;
        if own == base.is_gguf() || !base.reorders(site) {
            return Ok(());
        }
        let expected = "a matrix whose rows lie alike in the adapter and in the model";
        let error = self.wrong(&site.name, expected, "heads in the order of the other format");
        Err(error.of(ErrorKind::Unsupported).hint("use the model's folder of safetensors"))
    }

    /// The rank and both factors, `[rank, input]` (of a table `[input, rank]`) and
    /// `[output, rank]`.
    pub(crate) fn factors(
        &self,
        change: &Change,
        input: usize,
        output: usize,
    ) -> Result<(usize, Vec<f32>, Vec<f32>)> {
        let down = self.tensor(&change.down)?;
        // PEFT keeps the table of embeddings' factor as a matrix of columns, the others by token.
        let by_column = self.kind == AdapterFormat::Peft;
        let columns = if change.gathers { by_column } else { !change.turned };
        let (rank, expected) = match (columns, down.shape) {
            (true, &[rank, _]) => (rank, [rank, input]),
            (false, &[_, rank]) => (rank, [input, rank]),
            _ => (0, [0, input]),
        };
        if rank == 0 || down.shape != expected {
            let expected =
                if columns { format!("[rank, {input}]") } else { format!("[{input}, rank]") };
            return Err(self.wrong(&change.down, expected, shape(down.shape)));
        }
        let up_shape = if change.turned { [rank, output] } else { [output, rank] };
        let mut low = self.numbers(&change.down, &[&expected])?;
        let mut up = self.numbers(&change.up, &[&up_shape])?;
        if change.turned {
            up = turned(&up, output);
        }
        if columns == change.gathers {
            low = match columns {
                true => turned(&low, input),
                false => turned(&low, rank),
            };
        }
        Ok((rank, low, up))
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        self.tensors.get(name).ok_or_else(|| self.wrong(name, "a tensor", "none"))
    }

    /// A tensor's elements; it has one of these shapes.
    pub(crate) fn numbers(&self, name: &str, shapes: &[&[usize]]) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        if !shapes.contains(&tensor.shape) {
            return Err(self.wrong(name, shape(shapes[0]), shape(tensor.shape)));
        }
        tensor.check_numbers(|| format!("{}: {name}", self.path.display()))?;
        let values = tensor.to_f32()?;
        match NotFinite::among(&values) {
            None => Ok(values),
            Some(found) => {
                let value = values.get(found.element).copied().unwrap_or(f32::NAN);
                let found = format!("{value} at element {}", found.element);
                Err(self.wrong(name, "numbers that are finite", found))
            }
        }
    }

    /// The order in which the base has the rows of a site whose heads rotate in another pairing
    /// than the adapter's: for each row the adapter's.
    pub(crate) fn order(&self, base: &Base<'_>, site: &Site) -> Option<Vec<usize>> {
        match (self.kind, base.is_gguf()) {
            (AdapterFormat::Gguf, true) => None,
            (AdapterFormat::Peft | AdapterFormat::Mlx, _) => base.order(site),
            (AdapterFormat::Gguf, false) => {
                let permuted = base.config.architecture.permutes_heads();
                (permuted && base.order(site).is_none())
                    .then(|| base.of_heads(site, |i, half| i % half * 2 + i / half))?
            }
        }
    }

    /// The same of columns.
    fn column_order(&self, base: &Base<'_>, site: &Site) -> Option<Vec<usize>> {
        base.column_order(site).filter(|_| self.kind != AdapterFormat::Gguf)
    }
}

/// The tensor of which a weight of `rows` rows is some, in whatever order, and which of them each
/// is; for a matrix that is stored `[in, out]`, the rows of its transpose. None for a whole tensor,
/// and for what is made of several.
pub fn fused(source: &Source, rows: usize) -> Option<(&str, Vec<usize>)> {
    let partial = matches!(source, Source::Rows { .. } | Source::Permute(..) | Source::Concat(_));
    let (tensor, _) = source.stored_row(0).filter(|_| partial)?;
    let row = |row: usize| source.stored_row(row).filter(|(of, _)| *of == tensor);
    let all = (0..rows).map(|at| Some(row(at)?.1)).collect::<Option<Vec<usize>>>()?;
    Some((tensor, all))
}

/// Whether rows that [`fused`] tells are some of a tensor's more than once, one behind the other.
pub fn repeats(rows: &[usize]) -> bool {
    rows.windows(2).any(|pair| pair[0] == pair[1])
}

/// The rows of `values` in another order.
pub(crate) fn reordered(values: &[f32], width: usize, order: &[usize]) -> Vec<f32> {
    order.iter().flat_map(|&row| &values[row * width..(row + 1) * width]).copied().collect()
}

/// A matrix `[width, n]` of a matrix `[n, width]`.
pub(crate) fn turned(values: &[f32], width: usize) -> Vec<f32> {
    let rows = values.len() / width.max(1);
    (0..values.len()).map(|i| values[i % rows * width + i / rows]).collect()
}

/// The lengths of the rows of `weight + scale up down`: `weight` is `[out, input]`, `down`
/// `[rank, input]` and `up` `[out, rank]`.
pub fn lengths(weight: &[f32], input: usize, scale: f32, [down, up]: [&[f32]; 2]) -> Vec<f64> {
    let (rows, rank) = (weight.len() / input.max(1), down.len() / input.max(1));
    let mut lengths = vec![0f64; rows];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, lengths) in lengths.chunks_mut(each).enumerate() {
            let first = part * each;
            scope.spawn(move || {
                for (i, length) in lengths.iter_mut().enumerate() {
                    let row = first + i;
                    let mut sum = weight[row * input..][..input].to_vec();
                    for (r, factor) in up[row * rank..][..rank].iter().enumerate() {
                        let low = &down[r * input..][..input];
                        sum.iter_mut().zip(low).for_each(|(s, low)| *s += scale * factor * low);
                    }
                    let squares = sum.iter().map(|v| f64::from(*v) * f64::from(*v));
                    *length = squares.sum::<f64>().sqrt();
                }
            });
        }
    });
    lengths
}

/// DoRA's change of a site's product: each row of the changed matrix, `W + scale up down`, gets the
/// length `magnitude`, if there is one.
pub(crate) fn gain(
    base: &Base<'_>,
    site: &Site,
    delta: &Delta,
    magnitude: &[Option<f32>],
) -> Result<Gain> {
    let numbers = |id: WeightId| base.program.weights[id.0].read(base.tensors)?.to_f32();
    let (weight, bias) = (numbers(site.weight)?, site.bias.map(numbers).transpose()?);
    let lengths = lengths(&weight, site.input, delta.scale, [&delta.down, &delta.up]);
    let mut gains = Vec::with_capacity(site.output);
    for (magnitude, length) in magnitude.iter().zip(&lengths) {
        let gain = magnitude.map_or(1.0, |magnitude| f64::from(magnitude) / length);
        if !gain.is_finite() {
            let error = Error::new(&site.name, "rows that are not all zeros, for DoRA", length);
            return Err(error);
        }
        gains.push(gain as f32);
    }
    let offset =
        |(o, gain): (usize, &f32)| bias.as_ref().map_or(0.0, |bias| (1.0 - gain) * bias[o]);
    Ok(Gain { offset: gains.iter().enumerate().map(offset).collect(), gain: gains })
}

/// The same adapter in half the memory beside quantised matrices: its factors are rounded to bf16
/// there. Beside other matrices the CPU keeps them in f32, and a GPU rounds them itself.
///
/// # Errors
/// A matrix that the model's files do not have.
pub fn shortened(base: &Base<'_>, mut adapter: AdapterFactors) -> Result<AdapterFactors> {
    for site in base.program.adaptable() {
        let Some(delta) = adapter.deltas.get_mut(&site.name) else { continue };
        let weight = &base.program.weights[site.weight.0];
        let encoding = weight.describe(base.tensors)?.encoding;
        if matches!(encoding, Encoding::Stored(DType::F32 | DType::F16 | DType::BF16)) {
            continue;
        }
        delta.down.iter_mut().chain(&mut delta.up).for_each(|v| *v = rounded(*v));
        delta.element = DType::BF16;
    }
    Ok(adapter)
}

/// The nearest number of bf16, to even; the greatest stay finite.
fn rounded(value: f32) -> f32 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    let nearest = f32::from_bits(nearest);
    if nearest.is_finite() { nearest } else { f32::from_bits(bits & 0xffff_0000) }
}
