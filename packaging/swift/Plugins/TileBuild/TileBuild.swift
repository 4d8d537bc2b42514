// Runs `tile build` before a target is compiled.
//
// The program is the one that DELFT_TILE names, else `tile` on PATH or among Cargo's programs
// (`cargo install --path crates/tile-cli`). DELFT_TILE_FILTER keeps kernels whose name contains it:
// all of them are more than a thousand, and minutes. DELFT_TILE_PLATFORMS is what `--platform` takes.

import Foundation
import PackagePlugin

@main
struct TileBuild: BuildToolPlugin {
    func createBuildCommands(context: PluginContext, target: Target) throws -> [Command] {
        let variables = ProcessInfo.processInfo.environment
        let tile = try program(variables)
        let out = context.pluginWorkDirectoryURL.appendingPathComponent("kernels")
        let platforms = variables["DELFT_TILE_PLATFORMS"] ?? "macos,ios,ios-simulator"
        let libraries = platforms.split(separator: ",").map { platform in
            platform == "macos" ? "kernels.metallib" : "kernels-\(platform).metallib"
        }
        let files = ["Launch.swift", "Kernels.swift", "manifest.json"] + libraries
        var arguments = [
            "build", "--emit", "swift,manifest,metallib", "--platform", platforms, "--out", out.path,
        ]
        if let filter = variables["DELFT_TILE_FILTER"] { arguments.append(filter) }
        return [
            .buildCommand(
                displayName: "tile build", executable: tile, arguments: arguments,
                inputFiles: [tile], outputFiles: files.map { out.appendingPathComponent($0) })
        ]
    }

    /// Where `tile` is.
    private func program(_ variables: [String: String]) throws -> URL {
        var places: [String] = []
        if let named = variables["DELFT_TILE"] {
            places = [named]
        } else {
            places = (variables["PATH"] ?? "").split(separator: ":").map { "\($0)/tile" }
            if let home = variables["HOME"] { places.append("\(home)/.cargo/bin/tile") }
        }
        guard let found = places.first(where: FileManager.default.isExecutableFile(atPath:)) else {
            throw Missing()
        }
        return URL(fileURLWithPath: found)
    }
}

/// There is no `tile`.
struct Missing: Error, CustomStringConvertible {
    var description: String {
        "TileBuild: expected the program `tile` on PATH, found none; hint: cargo install --path "
            + "crates/tile-cli, or DELFT_TILE"
    }
}
