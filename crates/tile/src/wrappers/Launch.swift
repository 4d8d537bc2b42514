// Launches of built kernels by their manifest: `tile build` writes this file; do not edit.
//
// `Kernels` reads `manifest.json` and the library beside it, checks a launch against its kernel's
// contract, and encodes it, directly or as an indirect command. It may be used from several threads.
// Nothing traps: what a contract forbids is thrown, in one line.

import Foundation
import Metal

/// A buffer, and the byte at which a kernel's array begins in it.
public struct Bound: @unchecked Sendable {
    public let buffer: MTLBuffer
    public let offset: Int

    public init(_ buffer: MTLBuffer, offset: Int = 0) {
        self.buffer = buffer
        self.offset = offset
    }
}

/// A constant, an argument or a dimension.
public enum Number: Sendable, Hashable {
    case uint(UInt32)
    case int(Int32)
    case float(Float)
    case bool(Bool)

    /// The bits that the kernel sees.
    public var bits: UInt32 {
        switch self {
        case .uint(let value): return value
        case .int(let value): return UInt32(bitPattern: value)
        case .float(let value): return value.bitPattern
        case .bool(let value): return value ? 1 : 0
        }
    }

    /// The type that the manifest has for it.
    var dtype: String {
        switch self {
        case .uint: return "u32"
        case .int: return "i32"
        case .float: return "f32"
        case .bool: return "bool"
        }
    }
}

/// A kernel with its buffers, in binding order, and its numbers by name.
public struct Launch: Sendable {
    public var kernel: String
    public var buffers: [Bound]
    public var numbers: [String: Number]

    public init(_ kernel: String, _ buffers: [Bound], _ numbers: [String: Number] = [:]) {
        self.kernel = kernel
        self.buffers = buffers
        self.numbers = numbers
    }
}

/// What does not hold: where, what was expected, what was found.
public struct KernelError: Error, CustomStringConvertible, Sendable {
    public let place: String
    public let expected: String
    public let found: String

    public var description: String { "\(place): expected \(expected), found \(found)" }

    init(_ place: String, expected: String, found: String) {
        self.place = place
        self.expected = expected
        self.found = found
    }
}

/// `manifest.json`.
public struct Manifest: Decodable, Sendable {
    public let version: Int
    public let kernels: [Entry]

    public struct Entry: Decodable, Sendable {
        public let name: String
        public let family: String
        /// What decides what it computes, by name.
        public let settings: [String: String]
        /// What decides only how it does so.
        public let schedule: [String: String]
        public let params: [Param]
        public let constants: [Constant]
        public let dimensions: [String]
        public let grid: [String]
        public let threads: Int
        public let requires: [String]
        public let metal: Metal?
    }

    public struct Param: Decodable, Sendable {
        public let name: String
        public let index: Int
        public let kind: String
        public let dtype: String
    }

    public struct Constant: Decodable, Sendable {
        public let name: String
        public let dtype: String
        public let metal: String
    }

    public struct Metal: Decodable, Sendable {
        public let language: [Int]
        public let macos: String
        public let ios: String
        /// Whether its schedule is one for Apple's GPUs.
        public let preferred: Bool?
    }

    /// The version of the format that this file reads.
    static let version = 3
}

/// A launch whose contract holds: a pipeline, what is bound to it, and the grid.
public struct Prepared: @unchecked Sendable {
    public let pipeline: MTLComputePipelineState
    public let grid: MTLSize
    public let threads: MTLSize
    let buffers: [(Int, Bound)]
    let words: [(Int, UInt32)]

    /// Bytes from one number of an indirect command to the next: what constant memory is aligned to.
    public static let step = 256

    /// Bytes that `record` needs in its buffer of numbers.
    public var numberBytes: Int { words.count * Prepared.step }

    /// Encodes the launch.
    public func encode(_ encoder: MTLComputeCommandEncoder) {
        encoder.setComputePipelineState(pipeline)
        for (index, bound) in buffers {
            encoder.setBuffer(bound.buffer, offset: bound.offset, index: index)
        }
        for (index, word) in words {
            var word = word
            encoder.setBytes(&word, length: 4, index: index)
        }
        encoder.dispatchThreadgroups(grid, threadsPerThreadgroup: threads)
    }

    /// Makes the launch an indirect command, whose numbers lie in a shared buffer from a byte on: it
    /// must live, and stay as it is, for as long as the command is executed. The caller sets barriers,
    /// and names all buffers and, on GPUs before family 9, the pipeline to the encoder (`touch`).
    public func record(
        _ command: MTLIndirectComputeCommand, numbers: MTLBuffer, at offset: Int = 0
    ) throws {
        guard offset >= 0, offset % Prepared.step == 0, numbers.length - offset >= numberBytes else {
            throw KernelError(
                "numbers", expected: "\(numberBytes) bytes from a multiple of \(Prepared.step) on",
                found: "\(numbers.length) bytes, from \(offset) on")
        }
        if let far = buffers.first(where: { $0.1.offset >> 32 != 0 }) {
            throw KernelError(
                "buffer \(far.0)", expected: "an offset below 4 GiB in an indirect command",
                found: "\(far.1.offset)")
        }
        command.setComputePipelineState(pipeline)
        for (index, bound) in buffers {
            command.setKernelBuffer(bound.buffer, offset: bound.offset, at: index)
        }
        for (position, (index, word)) in words.enumerated() {
            let at = offset + position * Prepared.step
            numbers.contents().storeBytes(of: word, toByteOffset: at, as: UInt32.self)
            command.setKernelBuffer(numbers, offset: at, at: index)
        }
        command.concurrentDispatchThreadgroups(grid, threadsPerThreadgroup: threads)
    }

    /// Names the pipeline to an encoder with a dispatch of nothing: on GPUs before family 9 (M3, A17)
    /// a pipeline that only indirect commands name is not reachable.
    public func touch(_ encoder: MTLComputeCommandEncoder) {
        encoder.setComputePipelineState(pipeline)
        let none = MTLSize(width: 0, height: 0, depth: 0)
        let one = MTLSize(width: 1, height: 1, depth: 1)
        encoder.dispatchThreadgroups(none, threadsPerThreadgroup: one)
    }
}

/// The kernels of one library. Pipelines are made once for each set of constants.
public final class Kernels: @unchecked Sendable {
    public let library: MTLLibrary
    public let manifest: Manifest
    private let entries: [String: Manifest.Entry]
    private let lock = NSLock()
    private var pipelines: [String: MTLComputePipelineState] = [:]

    /// The library's file for this platform, as `tile build` names it.
    public static var libraryName: String {
        #if os(iOS) && targetEnvironment(simulator)
            return "kernels-ios-simulator.metallib"
        #elseif os(iOS)
            return "kernels-ios.metallib"
        #else
            return "kernels.metallib"
        #endif
    }

    /// Of a library and the text of its manifest.
    public init(library: MTLLibrary, manifest: Data) throws {
        let found: Manifest
        do {
            found = try JSONDecoder().decode(Manifest.self, from: manifest)
        } catch {
            throw KernelError("manifest.json", expected: "a manifest", found: "\(error)")
        }
        guard found.version == Manifest.version else {
            throw KernelError(
                "manifest.json", expected: "version \(Manifest.version)", found: "\(found.version)")
        }
        self.library = library
        self.manifest = found
        entries = Dictionary(found.kernels.map { ($0.name, $0) }, uniquingKeysWith: { a, _ in a })
    }

    /// Of a folder that `tile build` wrote.
    public convenience init(device: MTLDevice, folder: URL) throws {
        let library = try device.makeLibrary(URL: folder.appendingPathComponent(Kernels.libraryName))
        let manifest = try Data(contentsOf: folder.appendingPathComponent("manifest.json"))
        try self.init(library: library, manifest: manifest)
    }

    /// The kernel of a family whose parameters have these types, by name, whose settings have these
    /// values, and whose contract these numbers meet. Of several that differ in their schedules alone
    /// one for Apple's GPUs goes first; those that compute different things are told apart by what the
    /// error asks for.
    public func choose(
        family: String, types: [String: String] = [:], settings: [String: String] = [:],
        numbers: [String: Number] = [:]
    ) throws -> Manifest.Entry {
        let sizes = numbers.mapValues { Int($0.bits) }
        let fitting = try manifest.kernels.filter { entry in
            let typed = types.allSatisfy { name, dtype in
                entry.params.contains { $0.name == name && $0.dtype == dtype }
            }
            let set = settings.allSatisfy { name, value in entry.settings[name] == value }
            guard entry.family == family, entry.metal != nil, typed, set else { return false }
            return try entry.requires.allSatisfy { try Rule($0, entry.name).admits(sizes) }
        }
        guard let first = fitting.first else {
            throw KernelError(
                family, expected: "a kernel of these types, settings and sizes", found: "none")
        }
        let names = Set(fitting.flatMap { $0.settings.keys })
        // The function first: other settings are its own.
        for name in names.sorted(by: { $0 == "function" || ($1 != "function" && $0 < $1) }) {
            let values = Set(fitting.map { $0.settings[name] ?? "none" })
            guard values.count == 1 else {
                let list = values.sorted().joined(separator: ", ")
                throw KernelError(family, expected: "one value of `\(name)`", found: list)
            }
        }
        return fitting.first { $0.metal?.preferred == true } ?? first
    }

    /// Checks a launch, and finds or makes its pipeline.
    public func prepare(_ launch: Launch) throws -> Prepared {
        let name = launch.kernel
        guard let entry = entries[name], entry.metal != nil else {
            throw KernelError(name, expected: "a kernel of this library for Metal", found: "none")
        }
        let arrays = entry.params.filter { $0.kind == "buffer" }
        guard arrays.count == launch.buffers.count else {
            throw KernelError(
                name, expected: "\(arrays.count) buffers", found: "\(launch.buffers.count)")
        }
        let arguments = entry.params.filter { $0.kind != "buffer" }
        let words = try arguments.map {
            ($0.index, try number(launch, $0.name, $0.dtype).bits)
        }
        let constants = try entry.constants.map { ($0, try number(launch, $0.name, $0.dtype)) }
        for dimension in entry.dimensions {
            _ = try number(launch, dimension, "u32")
        }
        let sizes = launch.numbers.mapValues { Int($0.bits) }
        try check(entry, launch, arrays, sizes)
        let grid = try entry.grid.map { try Extent($0, name).value(sizes) }
        return Prepared(
            pipeline: try pipeline(entry, constants),
            grid: MTLSize(width: grid[0], height: grid[1], depth: grid[2]),
            threads: MTLSize(width: entry.threads, height: 1, depth: 1),
            buffers: zip(arrays, launch.buffers).map { ($0.0.index, $0.1) }, words: words)
    }

    /// Checks a launch and encodes it.
    public func encode(_ launch: Launch, _ encoder: MTLComputeCommandEncoder) throws {
        try prepare(launch).encode(encoder)
    }

    /// A number of a launch, of the type that its kernel has for it.
    private func number(_ launch: Launch, _ name: String, _ dtype: String) throws -> Number {
        guard let number = launch.numbers[name], number.dtype == dtype else {
            let found = launch.numbers[name].map { $0.dtype } ?? "none"
            throw KernelError(launch.kernel, expected: "`\(name)` as \(dtype)", found: found)
        }
        return number
    }

    /// The rules of the contract that sizes and buffers decide.
    private func check(
        _ entry: Manifest.Entry, _ launch: Launch, _ arrays: [Manifest.Param], _ sizes: [String: Int]
    ) throws {
        let named = Dictionary(
            zip(arrays, launch.buffers).map { ($0.0.name, ($0.0, $0.1)) },
            uniquingKeysWith: { a, _ in a })
        for (array, bound) in named.values {
            let bytes = try elementBytes(array.dtype, entry.name)
            guard bound.offset >= 0, bound.offset % bytes == 0 else {
                throw KernelError(
                    entry.name, expected: "`\(array.name)` aligned to \(bytes)",
                    found: "offset \(bound.offset)")
            }
        }
        for text in entry.requires {
            let holds: Bool
            switch try Rule(text, entry.name) {
            case .holds(let name, let extent):
                guard let (array, bound) = named[name] else { holds = false; break }
                let bytes = try elementBytes(array.dtype, entry.name)
                let room = max(bound.buffer.length - bound.offset, 0) / bytes
                holds = room >= (try extent.value(sizes))
            case .aligned(let name, let bytes):
                holds = named[name].map { $0.1.offset % bytes == 0 } ?? false
            case let rule:
                holds = try rule.admits(sizes)
            }
            guard holds else {
                throw KernelError(entry.name, expected: text, found: "a launch without it")
            }
        }
    }

    private func elementBytes(_ dtype: String, _ place: String) throws -> Int {
        switch dtype {
        case "f32", "i32", "u32": return 4
        case "f16", "bf16", "i16", "u16": return 2
        case "i8", "u8", "bool": return 1
        default: throw KernelError(place, expected: "a type of elements", found: dtype)
        }
    }

    /// Pipelines may stand in indirect command buffers.
    private func pipeline(
        _ entry: Manifest.Entry, _ constants: [(Manifest.Constant, Number)]
    ) throws -> MTLComputePipelineState {
        let key = entry.name + constants.map { " \($0.1.bits)" }.joined()
        lock.lock()
        defer { lock.unlock() }
        if let known = pipelines[key] { return known }
        let values = MTLFunctionConstantValues()
        for (constant, number) in constants {
            var bits = number.bits
            switch number {
            case .uint: values.setConstantValue(&bits, type: .uint, withName: constant.metal)
            case .int: values.setConstantValue(&bits, type: .int, withName: constant.metal)
            case .float: values.setConstantValue(&bits, type: .float, withName: constant.metal)
            case .bool(var value):
                values.setConstantValue(&value, type: .bool, withName: constant.metal)
            }
        }
        let descriptor = MTLComputePipelineDescriptor()
        descriptor.computeFunction = try library.makeFunction(
            name: entry.name, constantValues: values)
        descriptor.supportIndirectCommandBuffers = true
        let made = try library.device.makeComputePipelineState(
            descriptor: descriptor, options: [], reflection: nil)
        guard made.maxTotalThreadsPerThreadgroup >= entry.threads else {
            throw KernelError(
                entry.name, expected: "\(entry.threads) threads in a threadgroup",
                found: "room for \(made.maxTotalThreadsPerThreadgroup)")
        }
        pipelines[key] = made
        return made
    }
}

/// A rule of a contract, as the manifest writes it.
enum Rule {
    /// A size is a multiple of a number: `width divisible by 8`.
    case divisible(Extent, Int)
    /// A size is at most a number: `width at most 4096`.
    case most(Extent, Int)
    /// An array has so many elements: `x holds rows * width`.
    case holds(String, Extent)
    /// An array begins at a multiple of so many bytes: `x aligned to 16`.
    case aligned(String, Int)

    init(_ text: String, _ place: String) throws {
        func parts(_ word: String) -> (String, String)? {
            guard let range = text.range(of: " \(word) ") else { return nil }
            return (String(text[..<range.lowerBound]), String(text[range.upperBound...]))
        }
        if let (size, by) = parts("divisible by"), let by = Int(by), by > 0 {
            self = .divisible(try Extent(size, place), by)
        } else if let (size, most) = parts("at most"), let most = Int(most) {
            self = .most(try Extent(size, place), most)
        } else if let (name, size) = parts("holds") {
            self = .holds(name, try Extent(size, place))
        } else if let (name, bytes) = parts("aligned to"), let bytes = Int(bytes), bytes > 0 {
            self = .aligned(name, bytes)
        } else {
            throw KernelError(place, expected: "a rule of a contract", found: "`\(text)`")
        }
    }

    /// Whether sizes admit it: true where it is about buffers, or about a size that is not among them.
    func admits(_ sizes: [String: Int]) throws -> Bool {
        switch self {
        case .divisible(let size, let by): return try size.known(sizes).map { $0 % by == 0 } ?? true
        case .most(let size, let most): return try size.known(sizes).map { $0 <= most } ?? true
        case .holds, .aligned: return true
        }
    }
}

/// A size over names: sums, products and `ceil_div(a, b)`.
struct Extent {
    private indirect enum Node {
        case literal(Int)
        case name(String)
        case sum(Node, Node)
        case product(Node, Node)
        case quotient(Node, Node)
    }

    private let node: Node
    private let text: String
    private let place: String

    init(_ text: String, _ place: String) throws {
        var rest = Substring(text)
        node = try Extent.sum(&rest, place)
        guard rest.isEmpty else {
            throw KernelError(place, expected: "a size", found: "`\(text)`")
        }
        self.text = text
        self.place = place
    }

    /// Its value; each name must have one.
    func value(_ sizes: [String: Int]) throws -> Int {
        guard let value = try known(sizes) else {
            throw KernelError(place, expected: "a number for each name in `\(text)`", found: "fewer")
        }
        return value
    }

    /// Its value, if each name has one.
    func known(_ sizes: [String: Int]) throws -> Int? {
        func of(_ node: Node) throws -> Int? {
            switch node {
            case .literal(let value): return value
            case .name(let name): return sizes[name]
            case .sum(let a, let b): return try both(a, b) { $0.addingReportingOverflow($1) }
            case .product(let a, let b): return try both(a, b) { $0.multipliedReportingOverflow(by: $1) }
            case .quotient(let a, let b):
                guard let a = try of(a), let b = try of(b) else { return nil }
                guard b > 0 else {
                    throw KernelError(place, expected: "a divisor above 0", found: "`\(text)`")
                }
                return a / b + (a % b > 0 ? 1 : 0)
            }
        }
        func both(
            _ a: Node, _ b: Node, _ join: (Int, Int) -> (partialValue: Int, overflow: Bool)
        ) throws -> Int? {
            guard let a = try of(a), let b = try of(b) else { return nil }
            let (value, overflow) = join(a, b)
            guard !overflow else {
                throw KernelError(place, expected: "a size of 63 bits", found: "`\(text)`")
            }
            return value
        }
        return try of(node)
    }

    private static func skip(_ rest: inout Substring, _ word: String) -> Bool {
        rest = rest.drop(while: { $0 == " " })
        guard rest.hasPrefix(word) else { return false }
        rest = rest.dropFirst(word.count)
        return true
    }

    private static func sum(_ rest: inout Substring, _ place: String) throws -> Node {
        var node = try product(&rest, place)
        while skip(&rest, "+") { node = .sum(node, try product(&rest, place)) }
        return node
    }

    private static func product(_ rest: inout Substring, _ place: String) throws -> Node {
        var node = try atom(&rest, place)
        while skip(&rest, "*") { node = .product(node, try atom(&rest, place)) }
        return node
    }

    private static func atom(_ rest: inout Substring, _ place: String) throws -> Node {
        let whole = rest
        let bad = KernelError(place, expected: "a size", found: "`\(whole)`")
        if skip(&rest, "ceil_div(") {
            let a = try sum(&rest, place)
            guard skip(&rest, ",") else { throw bad }
            let b = try sum(&rest, place)
            guard skip(&rest, ")") else { throw bad }
            return .quotient(a, b)
        }
        if skip(&rest, "(") {
            let inner = try sum(&rest, place)
            guard skip(&rest, ")") else { throw bad }
            return inner
        }
        let word = rest.prefix(while: { $0.isASCII && ($0.isLetter || $0.isNumber || $0 == "_") })
        rest = rest.dropFirst(word.count)
        guard let first = word.first else { throw bad }
        if !first.isNumber { return .name(String(word)) }
        guard let value = Int(word) else { throw bad }
        return .literal(value)
    }
}
