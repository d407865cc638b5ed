// The search of the site runs in a worker, and browsers allow none to a page that is opened as a
// file. There this Worker runs the same script in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => Promise.all(urls.map(url => this.load(url)))
      this.frame = frame
      this.ready = this.load(url)
    }

    load(url) {
      const document = this.frame.contentDocument
      const script = Object.assign(document.createElement("script"), { src: url })
      document.body.append(script)
      return new Promise((loaded, failed) => Object.assign(script, { onload: loaded, onerror: failed }))
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
